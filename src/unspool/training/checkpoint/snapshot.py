"""Models exported while a stage trains, for scores by training tokens.

They are scored when the stage has ended, because its optimizer state leaves no memory for that before. A snapshot is a
whole model folder; it is deleted when its scores are there.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unspool.models.export import save_model
from unspool.training.config import StageConfig
from unspool.training.parallel.fsdp import unshard_model
from unspool.training.parallel.mesh import DistContext


def snapshots_dir(stage_dir: Path) -> Path:
    """The folder of a stage's snapshots: beside `stages`, since a published stage lists all of its files."""
    return stage_dir.parent.parent / "snapshots" / stage_dir.name


def find_snapshots(stage_dir: Path) -> dict[int, Path]:
    """Complete snapshots by step."""
    found = snapshots_dir(stage_dir).glob("step-*[0-9]")
    return {int(path.name.removeprefix("step-")): path for path in sorted(found)}


def snapshot_writer(
    stage: StageConfig, model: Any, tokenizer: Any, stage_dir: Path, dist_context: DistContext
) -> Callable[[int], None]:
    """A function that exports the model as it is after a step. All ranks must call it."""
    dtype = torch.float32 if dist_context.ranks.device.type == "cpu" else torch.bfloat16

    def write(step: int) -> None:
        before = model.config.max_position_embeddings
        model.config.max_position_embeddings = stage.export_context_length or before
        try:
            whole = model
            if dist_context.mesh is not None:
                whole = unshard_model(model, dtype=dtype, is_leader=dist_context.is_leader)
            if dist_context.is_leader:
                folder = snapshots_dir(stage_dir) / f"step-{step:06d}"
                aside = folder.with_name(folder.name + ".tmp")
                for path in (aside, folder):
                    shutil.rmtree(path, ignore_errors=True)
                save_model(whole, tokenizer, aside, dtype=dtype)
                aside.rename(folder)
        finally:
            model.config.max_position_embeddings = before
        dist_context.barrier()

    return write
