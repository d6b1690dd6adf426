"""The loop of a stage: rows, step, a line of metrics, now and then a checkpoint.

In: a model with its updater, the mix, a work folder. Out: a trained model, `metrics.jsonl`, checkpoints.
Promise: a step whose loss or gradient is not a number stops the stage before it changes a weight, and names its rows.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unspool.base.artefact import write_atomic
from unspool.base.errors import UnspoolError
from unspool.base.progress import progress_bar
from unspool.base.sizes import format_count
from unspool.data.mix import Mix
from unspool.data.store import RowSet
from unspool.train.checkpoint import save_checkpoint
from unspool.train.config import StageConfig
from unspool.train.loader import Picks, load_steps
from unspool.train.optimizer import Updater
from unspool.train.schedule import learning_rate
from unspool.train.step import StepResult, train_step

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Training:
    model: Any
    updater: Updater
    mix: Mix
    rows: dict[str, RowSet]
    device: torch.device


def run_steps(stage: StageConfig, training: Training, work: Path, *, done: int) -> None:
    every = stage.checkpoint_every or max(1, stage.steps // 10)
    _keep_metrics(work / METRICS, done)
    training.model.train()
    steps = load_steps(stage, training.mix, training.rows, first=done + 1, pin=training.device.type == "cuda")
    with progress_bar(f"stage {stage.name}", stage.steps) as advance, (work / METRICS).open("a") as metrics:
        advance(done, "")
        began = time.perf_counter()
        for step, batches in steps:
            lr = learning_rate(stage, step)
            result = train_step(training.model, training.updater, batches, lr=lr)
            _refuse_nonsense(result, stage, step, batches.picks)
            seconds = time.perf_counter() - began
            line = {
                "step": step,
                "tokens": step * stage.batch,
                "loss": result.loss,
                "lr": lr,
                "grad_norm": result.grad_norm,
                "seconds": round(seconds, 4),
                "tokens_per_second": round(stage.batch / seconds, 1),
                "losses": result.losses,
            }
            metrics.write(json.dumps(line) + "\n")
            metrics.flush()
            advance(1, f"loss {result.loss:.3f}  {format_count(stage.batch / seconds)} tok/s")
            if step % every == 0 or step == stage.steps:
                save_checkpoint(work / "checkpoints", training.model, training.updater.optimizer, step=step)
            began = time.perf_counter()


def _refuse_nonsense(result: StepResult, stage: StageConfig, step: int, picks: Picks) -> None:
    if result.finite:
        return
    rows = ", ".join(f"{name}[{index}]" for slot in picks for name, index in slot[:4])
    raise UnspoolError(
        f"stage {stage.name}: the loss or gradient of step {step} is not a number (rows {rows}); nothing was "
        f"updated by it. A re-run resumes before this step; lowering stages.{stage.name}.lr starts the stage anew."
    )


def _keep_metrics(path: Path, done: int) -> None:
    """Drop lines of steps after the checkpoint: they will be made again."""
    if path.is_file():
        lines = path.read_text().splitlines(keepends=True)
        write_atomic(path, "".join(lines[:done]))
