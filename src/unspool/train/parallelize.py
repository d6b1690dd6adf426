"""A model made ready for several ranks.

In: a model with its weights, or without any yet (shards.py), the mesh, the stage's settings. Out: the same model.
Promise: loss, gradients and updated weights are those of one rank up to rounding. The model itself knows no ranks:
its attention calls what stands between it and the kernel, its layers have hooks.
Order: exchanges lie inside of what is recomputed, so that recomputing repeats them; what is compiled lies inside of
both, and FSDP's hooks outside of all, so that weights are there whenever something of a layer runs.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unspool.base.errors import ConfigError
from unspool.model.attention_reference import Rules
from unspool.model.fuse import fuse_parts
from unspool.model.memory import MemoryPolicy, apply_memory
from unspool.model.parts import attention_of, layers_of
from unspool.train.fsdp import apply_fsdp
from unspool.train.mesh import group_of
from unspool.train.parallel_config import ParallelConfig
from unspool.train.ring import ring_attention
from unspool.train.ulysses import gather_heads, gather_tokens, own_query_heads


def parallelize(
    model: Any,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    memory: MemoryPolicy | None = None,
    fuse: bool = False,
) -> Any:
    memory = memory or MemoryPolicy()
    _refuse_without_weights(model, memory, fuse=fuse)
    apply_sequence(model, mesh)
    if fuse:
        fuse_parts(model)
    apply_memory(model, memory)
    if mesh.size() > 1:
        apply_fsdp(model, mesh, offload=config.offload, layers_together=memory.recompute_every)
    return model


def _refuse_without_weights(model: Any, memory: MemoryPolicy, *, fuse: bool) -> None:
    """Some settings are tried on the weights, or need to know their device, when they are applied."""
    settings = {
        "mlp_tiles": memory.mlp_tiles,
        "offload": memory.offload,
        "keep_on_host": memory.keep_on_host,
        "compile": fuse,
    }
    asked = [name for name, setting in settings.items() if setting]
    if asked and next(model.parameters()).is_meta:
        raise ConfigError(
            f"{asked[0]} cannot be set up before the weights are there, and these are read part by part; leave it out."
        )


def apply_sequence(model: Any, mesh: DeviceMesh) -> None:
    """Let attention reach over the ranks that share a row."""
    exchange = Exchange(ulysses=group_of(mesh, "ulysses"), ring=group_of(mesh, "ring"))
    if exchange == Exchange(ulysses=None, ring=None):
        return
    for layer in layers_of(model):
        attention_of(layer).exchange = exchange


@dataclass(frozen=True)
class Exchange:
    """What stands between attention and its kernel: heads for tokens first, then keys around the ring."""

    ulysses: Any
    ring: Any

    def __call__(
        self,
        compute: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: Rules,
        sinks: Tensor | None,
        doc_lens: tuple[int, ...] | None,
    ) -> Tensor:
        assert doc_lens is not None, "a row on several ranks is known by the lengths of its documents"
        if self.ulysses is not None:
            query, key, value = gather_tokens(query, key, value, self.ulysses)
            sinks = None if sinks is None else own_query_heads(sinks, self.ulysses)
        if self.ring is None:
            out: Tensor = compute(query, key, value, rules, sinks, doc_lens)
        else:
            out = ring_attention(query, key, value, rules, sinks, doc_lens, self.ring)
        return out if self.ulysses is None else gather_heads(out, self.ulysses)
