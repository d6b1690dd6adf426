"""A model made ready for several ranks.

In: a model with its weights, or without any yet (shards.py), the mesh, the stage's settings. Out: the same model.
Promise: loss, gradients and updated weights are those of one rank up to rounding. The model itself knows no ranks:
its attention calls what stands between it and the kernel, its layers have hooks.
Order: exchanges lie inside of what is recomputed, so that recomputing repeats them; what is compiled lies inside of
both, and FSDP's hooks outside of all, so that weights are there whenever something of a layer runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, GenerationConfig

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.models.attention.reference import AttentionInputs, Kernel
from unspool.models.checks import attention_of, check_trainable, layers_of
from unspool.models.export import HARPE_TYPE
from unspool.models.fuse import fuse_parts
from unspool.models.load import load_model
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_rope
from unspool.training.config import StageConfig
from unspool.training.parallel.config import ParallelConfig
from unspool.training.parallel.fsdp import apply_fsdp
from unspool.training.parallel.mesh import Team, group_of
from unspool.training.parallel.ring import ring_attention
from unspool.training.parallel.sharded_load import build_empty, load_shards, why_not_by_parts
from unspool.training.parallel.ulysses import gather_heads, gather_tokens, own_query_heads


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
        apply_fsdp(model, mesh, offload=config.offload, layers_together=memory.layers_per_checkpoint)
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

    def __call__(self, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        assert inputs.doc_lens is not None, "a row on several ranks is known by the lengths of its documents"
        if self.ulysses is not None:
            sinks = None if inputs.sinks is None else own_query_heads(inputs.sinks, self.ulysses)
            inputs = replace(inputs.with_heads(*gather_tokens(*inputs.heads, self.ulysses)), sinks=sinks)
        out = kernel(inputs) if self.ring is None else ring_attention(inputs, self.ring)
        return out if self.ulysses is None else gather_heads(out, self.ulysses)


# A model from its files straight into the parts that ranks keep, where that can be done.


GENERATION = "generation_config.json"


def load_by_parts(
    stage: StageConfig, model: Any, rows: dict[str, Path], *, device: torch.device, team: Team
) -> Any | None:
    """All ranks call this, and all get a model or none."""
    mesh = team.mesh
    if mesh is None or not isinstance(model, str) or _needs_whole(stage, rows):
        return None
    folder = Path(model)
    if not team.from_leader(lambda: _can_be_read(folder)):
        return None
    return _read(stage, folder, mesh, device)


def _needs_whole(stage: StageConfig, rows: dict[str, Path]) -> bool:
    """Settings that are tried on weights, or that change whole ones."""
    memory = stage.memory
    tried = memory.mlp_tiles or memory.offload or memory.keep_on_host or stage.compile
    knots = any((read_manifest(folder) or {}).get("counts", {}).get("added_tokens") for folder in rows.values())
    return bool(tried or knots or stage.parallel.offload or stage.rope.needs_weights)


def _can_be_read(folder: Path) -> bool:
    """Whether its files have what the model has; if so, it is tried."""
    if not (folder / "config.json").is_file():
        return False
    content = (folder / "config.json").read_text()
    if HARPE_TYPE in content or '"text_config"' in content or why_not_by_parts(_config(folder), folder) is not None:
        return False
    whole = load_model(str(folder), device=torch.device("cpu"), dtype=_config(folder).dtype or torch.float32)
    check_trainable(whole)
    return True


def _read(stage: StageConfig, folder: Path, mesh: DeviceMesh, device: torch.device) -> Any:
    model = parallelize(build_empty(_config(folder)), mesh, stage.parallel, memory=stage.memory)
    load_shards(model, folder, device)
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    apply_rope(model, stage.rope, stage.context_length)
    return model


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)
