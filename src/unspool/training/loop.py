"""The loop of a stage: rows, step, guard, a line for those who watch, now and then a checkpoint.

In: a model with its updater, the mix, a work folder. Out: a trained model, metrics, ledger, checkpoints.
Promise: a step that goes wrong is stopped or skipped before it changes a weight, and its rows are named. Asked to stop
(SIGTERM, Ctrl-C), the running step is finished and saved. Several ranks go through it together, and judge alike, since
they go by the same numbers; the leader writes.
Elsewhere: what is written about each step (watch.py), what is wrong with one (guard.py), resuming (resume.py).
"""

import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import torch

from unspool.core.errors import UnspoolError
from unspool.data.mixture import Mix, ModelShape
from unspool.data.packing.store import RowSet
from unspool.training.checkpoint.resume import CHECKPOINTS, resumable
from unspool.training.checkpoint.save import Saver, checkpoints
from unspool.training.config import StageConfig
from unspool.training.distill.distill import AuxLoss
from unspool.training.interrupt import StoppedError, listen
from unspool.training.loader import LEDGER, Picks, ledger_line, load_steps
from unspool.training.metrics.logger import METRICS, GrowingFile, StepReport, Watch
from unspool.training.optim.base import Updater
from unspool.training.parallel.mesh import Team, one_rank
from unspool.training.spike_guard import Guard
from unspool.training.step import StepResult, train_step

logger = logging.getLogger(__name__)

# Learning rate by step.


def learning_rate(stage: StageConfig, step: int) -> float:
    """Rate of step 1 … `stage.steps`: linear warm-up, then a cosine down to the floor."""
    warmup_steps = int(stage.warmup_ratio * stage.steps)
    if step <= warmup_steps:
        return stage.lr * step / warmup_steps
    done = (step - warmup_steps) / max(1, stage.steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return stage.lr * (stage.min_lr_ratio + (1 - stage.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class Training:
    model: Any
    updater: Updater
    guard: Guard
    mix: Mix
    rows: dict[str, RowSet]
    device: torch.device
    team: Team | None = None  # None: one rank
    shape: ModelShape | None = None  # by which rows are given to ranks
    aux_loss: AuxLoss | None = None  # adds to the gradient of each step


def run_steps(stage: StageConfig, training: Training, work: Path, *, done: int, watch: Watch) -> None:
    every = stage.checkpoint_every or max(1, stage.steps // 10)
    guard = training.guard
    team = training.team or Team(one_rank(training.device), None)
    training.model.train()
    pin = training.device.type == "cuda"
    steps = load_steps(
        stage, training.mix, training.rows, first=done + 1, pin=pin, place=team.place, shape=training.shape
    )
    with (
        listen(f"stage {stage.name}") as stop,
        GrowingFile(work / LEDGER) if team.is_leader else nullcontext() as ledger,
        Saver(work / CHECKPOINTS, stage=stage.name, pin=pin, world_size=team.ranks.world_size) as saver,
    ):
        for step, batches in watch.timed(steps):
            team.ranks.at(step)
            lr = learning_rate(stage, step)
            result = train_step(
                training.model,
                training.updater,
                batches,
                lr=lr,
                is_good=guard.allows,
                max_norm=guard.max_norm,
                mesh=team.mesh,
                aux_loss=partial(training.aux_loss, step) if training.aux_loss is not None else None,
            )
            wrong = guard.wrong_with(result.loss, result.grad_norm)
            if not guard.note(result.loss, result.grad_norm, wrong):
                raise UnspoolError(_stopped(stage, step, batches.picks, wrong))
            if wrong:
                logger.warning(f"stage {stage.name}: step {step} is skipped: {wrong} (rows {_named(batches.picks)})")
            if ledger is not None:
                ledger.append(ledger_line(step, batches.picks, skipped=wrong))
            team.ranks.outside("saving or looking", step)
            watch.step(
                StepReport(
                    step=step,
                    loss=result.loss,
                    losses=result.losses,
                    lr=lr,
                    grad_norm=result.grad_norm,
                    doc_lens=batches.doc_lens,
                    skipped=wrong is not None,
                    more=_more(wrong, result),
                )
            )
            asked = _agreed(stop.signal, team)  # once: it may come between the next two lines
            if step % every == 0 or step == stage.steps or asked:
                files = {LEDGER: ledger.content} | _content(work / METRICS) if ledger is not None else {}
                saver.save(training.updater.state_tensors(), resumable(step, guard), files)
            if asked:
                saver.wait()
                _leave(stage, work, asked)
        saver.wait()


def _more(wrong: str | None, result: StepResult) -> dict[str, Any]:
    """What only some steps have."""
    found: dict[str, Any] = {"wrong": wrong} if wrong else {}
    if result.distance is not None:
        found["attention_distillation"] = result.distance if math.isfinite(result.distance) else None
    return found


def _agreed(asked: Signals | None, team: Team) -> Signals | None:
    """A signal may reach some ranks only, or some a step later; all stop after the same step."""
    return asked or SIGTERM if team.ranks.any(asked is not None) else None


def _content(path: Path) -> dict[str, bytes]:
    """By name; of several processes only one writes it."""
    return {path.name: path.read_bytes()} if path.is_file() else {}


def _leave(stage: StageConfig, work: Path, asked: Signals) -> None:
    saved = checkpoints(work / CHECKPOINTS)
    kept = f"saved as {saved[-1].name}" if saved else "nothing could be saved"
    logger.warning(f"stage {stage.name}: stopped by {asked.name}, {kept}; the same command goes on from there")
    raise StoppedError(asked)


def _stopped(stage: StageConfig, step: int, picks: Picks, wrong: str | None) -> str:
    updated = (
        "some weights were updated by it" if stage.optimizer.step == "in-backward" else "nothing was updated by it"
    )
    return (
        f"stage {stage.name}: step {step}: {wrong} (rows {_named(picks)}); {updated}. A re-run resumes "
        f"before this step; stages.{stage.name}.guard can skip such steps, and lowering stages.{stage.name}.lr starts "
        "the stage anew."
    )


def _named(picks: Picks) -> str:
    return ", ".join(f"{name}[{index}]" for slot in picks for name, index in slot[:4])
