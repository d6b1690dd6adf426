"""Models exported while a stage trains, for scores by training tokens.

They are scored after the stage, because its optimizer state leaves no memory for evaluation. A snapshot is a complete
model folder, which is deleted after scoring.
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
    """Return the folder of a stage's snapshots: not in `stages`, whose manifests list all files."""
    return stage_dir.parent.parent / "snapshots" / stage_dir.name


def find_snapshots(stage_dir: Path) -> dict[int, Path]:
    """Return the complete snapshots by step."""
    found = snapshots_dir(stage_dir).glob("step-*[0-9]")
    return {int(path.name.removeprefix("step-")): path for path in sorted(found)}


def snapshot_writer(
    stage: StageConfig, model: Any, tokenizer: Any, stage_dir: Path, dist_context: DistContext
) -> Callable[[int], None]:
    """Return a function that exports the model after a step. All ranks must call it."""
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
