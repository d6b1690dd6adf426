"""Set up a model for several ranks, and check first that a stage fits them.

Loss, gradients and updated weights equal those of one rank up to rounding. The model's code does not change: its
attention calls `Exchange` around the kernel, and its layers have hooks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, GenerationConfig

from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError
from unspool.data.packing.store import RowSet
from unspool.models.attention.reference import AttentionInputs, Kernel
from unspool.models.checks import attention_of, check_trainable, layers_of
from unspool.models.config import SIZES, NewModel, config_values
from unspool.models.fuse import fuse_parts
from unspool.models.load import load_model
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_rope
from unspool.training.batch import attended_by
from unspool.training.config import StageConfig
from unspool.training.parallel.config import Layout, ParallelConfig, Work, check_layout, not_on_ring, settle_layout
from unspool.training.parallel.fsdp import apply_fsdp, build_empty, load_shards, sharded_load_problem
from unspool.training.parallel.mesh import DistContext, group_of
from unspool.training.parallel.ring import ring_attention
from unspool.training.parallel.ulysses import gather_heads, gather_tokens, own_query_heads


def parallelize(
    model: Any,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    memory: MemoryPolicy | None = None,
    fuse: bool = False,
) -> Any:
    """Set up `model` in place for several ranks: with its weights on the CPU, or on the meta device (fsdp.py).

    Weights move to the device of `mesh` when they are sharded, layer by layer, so no rank has all of them there. The
    order matters. Exchanges are inside recomputed regions, so that recomputation repeats them. Compiled parts are
    inside both. FSDP's hooks are outermost, so that weights are gathered whenever a layer runs.
    """
    memory, device = memory or MemoryPolicy(), _device_of(mesh)
    apply_sequence(model, mesh)
    if fuse:
        fuse_parts(model, device=device)
    apply_memory(model, memory, device=device)
    if mesh.size() > 1:
        apply_fsdp(model, mesh, offload=config.offload, layers_together=memory.layers_per_checkpoint)
    return model


def _device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes, as FSDP chooses it."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def apply_sequence(model: Any, mesh: DeviceMesh) -> None:
    """Make attention exchange tensors with the ranks that share a row."""
    exchange = Exchange(ulysses=group_of(mesh, "ulysses"), ring=group_of(mesh, "ring"))
    if exchange == Exchange(ulysses=None, ring=None):
        return
    for layer in layers_of(model):
        attention_of(layer).exchange = exchange


@dataclass(frozen=True)
class Exchange:
    """Wrapper of the attention kernel: Ulysses first, then the ring."""

    ulysses: Any
    ring: Any

    def __call__(self, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        assert inputs.doc_lens is not None, "several ranks need doc_lens"
        if self.ulysses is not None:
            sinks = None if inputs.sinks is None else own_query_heads(inputs.sinks, self.ulysses)
            inputs = replace(inputs.with_heads(*gather_tokens(*inputs.heads, self.ulysses)), sinks=sinks)
        out = kernel(inputs) if self.ring is None else ring_attention(inputs, self.ring)
        return out if self.ulysses is None else gather_heads(out, self.ulysses)


@contextmanager
def whole_rows(model: Any) -> Iterator[None]:
    """Inside the context, every rank attends over whole sequences on its own, for text that ranks do not share."""
    found = [(attention, attention.exchange) for attention in map(attention_of, layers_of(model)) if _shares(attention)]
    for attention, _ in found:
        attention.exchange = None
    try:
        yield
    finally:
        for attention, exchange in found:
            attention.exchange = exchange


def _shares(attention: Any) -> bool:
    return isinstance(getattr(attention, "exchange", None), Exchange)


GENERATION = "generation_config.json"


def load_sharded(
    stage: StageConfig, model: Any, rows: dict[str, Path], *, device: torch.device, dist_context: DistContext
) -> Any | None:
    """Read weights from files directly into shards. All ranks must call this; all get a model, or all get None."""
    mesh = dist_context.mesh
    if mesh is None or not isinstance(model, str) or needs_full_weights(stage, rows):
        return None
    folder = Path(model)
    if not dist_context.from_leader(lambda: _can_load_sharded(folder)):
        return None
    return _read(stage, folder, mesh, device)


def needs_full_weights(stage: StageConfig, rows: dict[str, Path]) -> bool:
    """Return whether settings change full tensors, or keep shards in host memory."""
    knots = any((read_manifest(folder) or {}).get("counts", {}).get("added_tokens") for folder in rows.values())
    folded = stage.rope.needs_weights or stage.rope.attention_scale
    return bool(knots or stage.parallel.offload or folded)


def _can_load_sharded(folder: Path) -> bool:
    """Return whether the files hold the weights as the model stores them; if so, check that it can be trained."""
    if not (folder / "config.json").is_file():
        return False
    content = (folder / "config.json").read_text()
    if (
        '"head_bases"' in content
        or '"text_config"' in content
        or sharded_load_problem(_config(folder), folder) is not None
    ):
        return False
    full = load_model(str(folder), device=torch.device("cpu"), dtype=_config(folder).dtype or torch.float32)
    check_trainable(full)
    return True


def _read(stage: StageConfig, folder: Path, mesh: DeviceMesh, device: torch.device) -> Any:
    empty = build_empty(_config(folder))
    model = parallelize(empty, mesh, stage.parallel, memory=stage.memory, fuse=stage.compile)
    load_shards(model, folder, device)
    if (folder / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    apply_rope(model, stage.rope, stage.context_length)
    return model


def _config(folder: Path) -> Any:
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


# Checks before any weight is loaded


def check_fit(stage: StageConfig, model: str | NewModel, rows: Mapping[str, RowSet], *, world_size: int) -> Layout:
    """Return the stage's layout on `world_size` ranks; ConfigError with values that would fit."""
    layout = settle_layout(stage.parallel, world_size)
    if world_size == 1:
        return layout
    problem = stage.ranks_problem()
    if problem is not None:
        raise ConfigError(f"stage {stage.name}: {problem}")
    values = model_values(model)
    heads = int(values["num_attention_heads"])
    work = Work(
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        context_length=stage.context_length,
        batch_tokens=stage.batch_tokens,
        micro_batch_tokens=stage.tokens_per_pass,
        # Checking every row takes a while, and only a ring needs the result.
        document_masks=layout.ring > 1 and has_document_masks(stage, rows),
        not_on_ring=not_on_ring(values, stage.context_length),
        kv_heads_at_once=stage.attention_heads_at_once,
    )
    check_layout(layout, work)
    return layout


def has_document_masks(stage: StageConfig, rows: Mapping[str, RowSet]) -> bool:
    """Return whether a micro-batch of one row can hold documents that must not attend to each other."""
    if any(row_set.row_len < stage.context_length for row_set in rows.values()):
        return True
    return any(
        len(attended_by(row_set[index], stage.attention)) > 1
        for row_set in rows.values()
        for index in range(len(row_set))
    )


def model_values(model: str | NewModel) -> dict[str, Any]:
    """Return the config of a model, without its weights."""
    return SIZES[model.size] if isinstance(model, NewModel) else config_values(model)
