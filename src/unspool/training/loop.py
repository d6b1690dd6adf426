"""The training loop of a stage: rows, step, guard, metrics, checkpoints.

A bad step stops the stage or is skipped before it changes a weight, and the message names its rows. On SIGTERM or
Ctrl-C, the current step is finished and saved. All ranks run the loop and make the same decisions, because they have
the same numbers; the leader writes.
"""

import logging
import math
import time
from collections.abc import Callable
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
from unspool.training.host_budget import measure_room
from unspool.training.loader import LEDGER, Picks, StepBatches, ledger_line, load_steps
from unspool.training.losses.base import LossWeights
from unspool.training.metrics.logger import METRICS, JsonlLog, MetricsLogger, StepReport
from unspool.training.metrics.validation import SAMPLES, VALIDATION
from unspool.training.optim.updater import Updater
from unspool.training.parallel.mesh import DistContext, single_rank
from unspool.training.schedule import SpikeGuard, StoppedError, catch_stop_signals, learning_rate
from unspool.training.step import StepResult, start_step, train_step

logger = logging.getLogger(__name__)

# Types of devices that compute while the host logs.
LOGGED_LATE = ("cuda",)
# The last step needs no checkpoint if repeating the steps since the previous one takes less time than writing it. The
# export follows at once, so only a kill before its end costs these steps. A checkpoint of an 8B model takes as long to
# write as its export.
CHEAP_S = 300.0


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
    loss_weights: LossWeights | None = None  # of labels; None: all weigh the same


def run_steps(
    stage: StageConfig,
    training: Training,
    work: Path,
    *,
    done: int,
    metrics: MetricsLogger,
    snapshot: Callable[[int], None] | None = None,
) -> None:
    """Train the steps after `done`. On a GPU, a step is logged while the next one computes.

    `snapshot` is called after every `eval_every` steps but the last, before their checkpoint is written.
    """
    every = stage.checkpoint_every or max(1, stage.steps // 10)
    guard, updater = training.guard, training.updater
    dist_context = training.dist_context or DistContext(single_rank(training.device), None)
    ranks = dist_context.ranks
    training.model.train()
    pin = training.device.type == "cuda"
    steps = load_steps(
        stage,
        training.mix,
        training.rows,
        first=done + 1,
        pin=pin,
        coords=dist_context.coords,
        shape=training.shape,
        loss_weights=training.loss_weights,
    )
    with (
        catch_stop_signals(f"stage {stage.name}", ranks=ranks.world_size) as stop,
        JsonlLog(work / LEDGER) if ranks.is_leader else nullcontext() as ledger,
        Saver(
            work / CHECKPOINTS,
            stage=stage.name,
            pin=pin,
            world_size=ranks.world_size,
            room=partial(measure_room, dist_context),
        ) as saver,
    ):
        updater.before_update = saver.wait_for_copy
        log = StepLog(stage, guard, metrics, ledger)
        saved_at = time.monotonic()
        for step, batches in metrics.timed(steps):
            ranks.enter_step(step)
            lr = learning_rate(stage, step)
            if _may_log_late(training):
                found = start_step(training.model, updater, batches, lr=lr, before_update=log.settle)
            else:
                result = train_step(
                    training.model,
                    updater,
                    batches,
                    lr=lr,
                    is_good=guard.allows,
                    max_norm=guard.max_norm,
                    mesh=dist_context.mesh,
                    aux_loss=partial(training.aux_loss, step) if training.aux_loss is not None else None,
                )
                found = partial(_same, result)
            log.add(step, lr, batches, found)
            ranks.leave_step("saving or validating", step)
            asked = _agree_on_stop(stop.signal, dist_context)  # once: a signal may come between the next two lines
            is_last = step == stage.steps
            saves = step % every == 0 or is_last or asked is not None
            exports = snapshot is not None and bool(stage.eval_every) and step % (stage.eval_every or 1) == 0
            if saves or exports or metrics.probes(step) or not _may_log_late(training):
                log.settle()
            if snapshot is not None and exports and not is_last:
                with metrics.phases("snapshots"):
                    snapshot(step)
            if is_last and not asked and dist_context.from_leader(partial(_is_cheap, stage, saved_at)):
                saves = False
            if saves:
                began = time.monotonic()
                files = {LEDGER: ledger.content} | _read_logs(work) if ledger is not None else {}
                facts = resume_facts(step, guard) | {"logs": sorted(files)}
                saver.save(updater.state_tensors(), facts, files)
                saved_at = time.monotonic()
                metrics.phases.add("checkpoints", saved_at - began)
            if asked:
                saver.wait()
                _stop(stage, work, asked)
        with metrics.phases("checkpoints"):
            saver.wait()


class StepLog:
    """Writes the ledger and metrics of a step, and applies the guard, when the step's numbers have arrived."""

    def __init__(self, stage: StageConfig, guard: SpikeGuard, metrics: MetricsLogger, ledger: JsonlLog | None) -> None:
        self._stage, self._guard, self._metrics, self._ledger = stage, guard, metrics, ledger
        self._waiting: tuple[int, float, StepBatches, Callable[[], StepResult]] | None = None

    def add(self, step: int, lr: float, batches: StepBatches, found: Callable[[], StepResult]) -> None:
        assert self._waiting is None, "the previous step is not finished"
        self._waiting = step, lr, batches, found

    def settle(self) -> None:
        """Log the pending step, if there is one; UnspoolError if the guard stops the stage at it."""
        if self._waiting is None:
            return
        (step, lr, batches, found), self._waiting = self._waiting, None
        stage, guard, result = self._stage, self._guard, found()
        problem = guard.find_problem(result.loss, result.grad_norm)
        if not guard.record(result.loss, result.grad_norm, problem):
            raise UnspoolError(_refusal(stage, step, batches.picks, problem))
        if problem:
            logger.warning(f"stage {stage.name}: skipping step {step}: {problem} (rows {_row_names(batches.picks)})")
        if self._ledger is not None:
            self._ledger.append(ledger_line(step, batches.picks, skipped=problem))
        self._metrics.step(
            StepReport(
                step=step,
                loss=result.loss,
                losses=result.losses,
                lr=lr,
                grad_norm=result.grad_norm,
                seconds=result.seconds,
                doc_lens=batches.doc_lens,
                skipped=problem is not None,
                extra=_extra_metrics(problem, result),
            )
        )


def _same(result: StepResult) -> StepResult:
    return result


def _may_log_late(training: Training) -> bool:
    """Return whether the decision about a step needs only the step's own numbers, so that the device can make it."""
    alone = training.dist_context is None or training.dist_context.mesh is None
    return (
        training.device.type in LOGGED_LATE
        and alone
        and training.aux_loss is None
        and training.guard.config.spike == "off"
        and training.updater.can_finish_on_device
    )


def _is_cheap(stage: StageConfig, saved_at: float) -> bool:
    """Return whether repeating the steps since the last checkpoint is cheaper than saving, just before the export."""
    more = stage.attention_distillation is not None and stage.attention_distillation.after > 0
    return not more and time.monotonic() - saved_at < CHEAP_S


def _extra_metrics(problem: str | None, result: StepResult) -> dict[str, Any]:
    """Return the keys of `metrics.jsonl` that only some steps have."""
    found: dict[str, Any] = {"wrong": problem} if problem else {}
    if result.distance is not None:
        found["attention_distillation"] = result.distance if math.isfinite(result.distance) else None
    return found


def _agree_on_stop(asked: Signals | None, dist_context: DistContext) -> Signals | None:
    """Agree on a stop signal. It may reach only some ranks, or some later, but all ranks stop after the same step."""
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
