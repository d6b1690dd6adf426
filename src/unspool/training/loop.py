"""The training loop of a stage: rows, step, guard, metrics, checkpoints.

A bad step is stopped or skipped before it changes a weight, and its rows are named. On SIGTERM or Ctrl-C the current
step is finished and saved. Ranks run the loop together and decide alike, because they see the same numbers; the leader
writes.
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
from unspool.training.checkpoint.resume import CHECKPOINTS, resume_facts
from unspool.training.checkpoint.save import Saver, checkpoints
from unspool.training.config import StageConfig
from unspool.training.distill.distill import AuxLoss
from unspool.training.loader import LEDGER, Picks, ledger_line, load_steps
from unspool.training.metrics.logger import METRICS, JsonlLog, MetricsLogger, StepReport
from unspool.training.metrics.validation import SAMPLES, VALIDATION
from unspool.training.optim.updater import Updater
from unspool.training.parallel.mesh import DistContext, single_rank
from unspool.training.schedule import SpikeGuard, StoppedError, catch_stop_signals, learning_rate
from unspool.training.step import StepResult, train_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    model: Any
    updater: Updater
    guard: SpikeGuard
    mix: Mix
    rows: dict[str, RowSet]
    device: torch.device
    dist_context: DistContext | None = None  # None: one rank
    shape: ModelShape | None = None  # for the cost of rows; required with several data ranks
    aux_loss: AuxLoss | None = None  # adds to the gradient of each step


def run_steps(stage: StageConfig, training: Training, work: Path, *, done: int, metrics: MetricsLogger) -> None:
    every = stage.checkpoint_every or max(1, stage.steps // 10)
    guard = training.guard
    dist_context = training.dist_context or DistContext(single_rank(training.device), None)
    ranks = dist_context.ranks
    training.model.train()
    pin = training.device.type == "cuda"
    steps = load_steps(
        stage, training.mix, training.rows, first=done + 1, pin=pin, coords=dist_context.coords, shape=training.shape
    )
    with (
        catch_stop_signals(f"stage {stage.name}", ranks=ranks.world_size) as stop,
        JsonlLog(work / LEDGER) if ranks.is_leader else nullcontext() as ledger,
        Saver(work / CHECKPOINTS, stage=stage.name, pin=pin, world_size=ranks.world_size) as saver,
    ):
        for step, batches in metrics.timed(steps):
            ranks.enter_step(step)
            lr = learning_rate(stage, step)
            result = train_step(
                training.model,
                training.updater,
                batches,
                lr=lr,
                is_good=guard.allows,
                max_norm=guard.max_norm,
                mesh=dist_context.mesh,
                aux_loss=partial(training.aux_loss, step) if training.aux_loss is not None else None,
            )
            problem = guard.find_problem(result.loss, result.grad_norm)
            if not guard.record(result.loss, result.grad_norm, problem):
                raise UnspoolError(_refusal(stage, step, batches.picks, problem))
            if problem:
                logger.warning(
                    f"stage {stage.name}: skipping step {step}: {problem} (rows {_row_names(batches.picks)})"
                )
            if ledger is not None:
                ledger.append(ledger_line(step, batches.picks, skipped=problem))
            ranks.leave_step("saving or validating", step)
            metrics.step(
                StepReport(
                    step=step,
                    loss=result.loss,
                    losses=result.losses,
                    lr=lr,
                    grad_norm=result.grad_norm,
                    doc_lens=batches.doc_lens,
                    skipped=problem is not None,
                    extra=_extra_metrics(problem, result),
                )
            )
            asked = _agree_on_stop(stop.signal, dist_context)  # once: a signal may come between the next two lines
            if step % every == 0 or step == stage.steps or asked:
                files = {LEDGER: ledger.content} | _read_logs(work) if ledger is not None else {}
                facts = resume_facts(step, guard) | {"logs": sorted(files)}
                saver.save(training.updater.state_tensors(), facts, files)
            if asked:
                saver.wait()
                _stop(stage, work, asked)
        saver.wait()


def _extra_metrics(problem: str | None, result: StepResult) -> dict[str, Any]:
    """Keys of `metrics.jsonl` that only some steps have."""
    found: dict[str, Any] = {"wrong": problem} if problem else {}
    if result.distance is not None:
        found["attention_distillation"] = result.distance if math.isfinite(result.distance) else None
    return found


def _agree_on_stop(asked: Signals | None, dist_context: DistContext) -> Signals | None:
    """A signal may reach only some ranks, or some a step later; all stop after the same step."""
    return asked or SIGTERM if dist_context.ranks.any(asked is not None) else None


def _read_logs(work: Path) -> dict[str, bytes]:
    paths = [work / name for name in (METRICS, VALIDATION, SAMPLES)]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def _stop(stage: StageConfig, work: Path, asked: Signals) -> None:
    saved = checkpoints(work / CHECKPOINTS)
    kept = f"saved as {saved[-1].name}" if saved else "nothing could be saved"
    logger.warning(f"stage {stage.name}: stopped by {asked.name}, {kept}; rerun the same command to resume")
    raise StoppedError(asked)


def _refusal(stage: StageConfig, step: int, picks: Picks, problem: str | None) -> str:
    in_backward = stage.optimizer.step == "in-backward"
    updated = "it changed some weights" if in_backward else "it changed no weight"
    return (
        f"stage {stage.name}: step {step}: {problem} (rows {_row_names(picks)}); {updated}. A rerun resumes before "
        f"this step; set stages.{stage.name}.guard to skip such steps, or lower stages.{stage.name}.lr, which restarts "
        "the stage."
    )


def _row_names(picks: Picks) -> str:
    return ", ".join(f"{name}[{index}]" for slot in picks for name, index in slot[:4])
