"""Metrics, validation and samples of a training stage: JSON lines, a progress bar, external trackers.

A resumed stage continues the logs from its checkpoint. Logging does not change training.
"""

import json
import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from unspool.core.artifacts import write_atomic
from unspool.core.phases import Phases
from unspool.core.progress import Advance, long_bar
from unspool.core.sizes import format_size
from unspool.training.config import StageConfig, is_due
from unspool.training.metrics.flops import MfuCounter, SpeedMeter, count_flops, peak_flops, peak_memory_gib
from unspool.training.metrics.trackers import TENSORBOARD, Trackers, build_trackers
from unspool.training.metrics.validation import (
    SAMPLES,
    VALIDATION,
    Samples,
    Validation,
    build_samples,
    build_validation,
    escape,
    warn_if_trained_on,
)
from unspool.training.parallel.dtensor import compute_device
from unspool.training.parallel.mesh import DistContext

logger = logging.getLogger(__name__)


class JsonlLog:
    """A JSON-lines file that survives a full disk: lines that cannot be written are kept in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Unbuffered, so that a failed write leaves no data in a buffer.
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write()
        finally:
            self._file.close()

    def append(self, line: str) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += line.encode()
        try:
            self._write()
        except OSError as error:
            if not was_waiting:
                logger.warning(
                    f"cannot write {self._path.name} ({error.strerror or error}); keeping its lines in memory"
                )

    @property
    def content(self) -> bytes:
        """Return all lines, including those that are not on disk yet."""
        return self._path.read_bytes()[: self._size] + self._waiting

    def _write(self) -> None:
        try:
            while self._waiting:
                written = self._file.write(self._waiting) or 0
                self._waiting = self._waiting[written:]
                self._size += written
        except OSError:
            # A partial line may have been written: remove it, and keep the line in memory with the rest.
            self._truncate_to_last_line()
            raise

    def _truncate_to_last_line(self) -> None:
        content = self._path.read_bytes()
        end = content.rfind(b"\n") + 1
        self._waiting = content[end:] + self._waiting
        self._file.truncate(end)
        self._size = end


def truncate_log(path: Path, done: int) -> None:
    """Drop a truncated last line, and lines of steps after `done`, which will be repeated."""
    if path.is_file():
        kept = [line for line in _lines(path) if (step := _step_of(line)) is not None and step <= done]
        write_atomic(path, "".join(kept))


def has_step(path: Path, step: int) -> bool:
    return path.is_file() and any(_step_of(line) == step for line in _lines(path))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


METRICS = "metrics.jsonl"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The numbers of one optimizer step."""

    step: int
    loss: float
    losses: Mapping[str, float]  # by dataset
    lr: float
    grad_norm: float
    doc_lens: Sequence[int]  # lengths of spans that attend to themselves
    seconds: float | None = None  # by the device's clock, without waiting for rows; None: use the host's clock
    skipped: bool = False  # weights stayed unchanged
    extra: Mapping[str, Any] = field(default_factory=dict)  # more keys of the line


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Validation and samples of a model while it trains."""

    model: Any
    validation: Validation | None = None
    samples: Samples | None = None


class MetricsLogger:
    """A context manager that logs a stage: iterate over `timed(steps)` and call `step(report)` after each."""

    def __init__(
        self,
        stage: StageConfig,
        work: Path,
        *,
        done: int,
        device: torch.device,
        mfu: MfuCounter | None = None,
        probes: Probes | None = None,
        open_trackers: Callable[[], Trackers] = lambda: Trackers({}),
        is_leader: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stage, self._work, self._done, self._device = stage, work, done, device
        self._mfu, self._probes = mfu or MfuCounter(), probes
        self._open_trackers, self._is_leader, self._clock = open_trackers, is_leader, clock
        self._meter = SpeedMeter(steps=stage.steps, batch=stage.batch_tokens, clock=clock)
        # Times at which the rows of steps not logged yet were requested and received.
        self._times: deque[tuple[float, float]] = deque()
        self._logged = clock()
        # Seconds of the first step, of all other steps, and of validation and samples.
        self.phases = Phases(clock)
        self._trackers = Trackers({})
        self._advance: Advance | None = None
        self._files: dict[str, JsonlLog] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        if self._is_leader:
            for name in self._log_names():
                truncate_log(self._work / name, self._done)
                self._files[name] = self._closing.enter_context(JsonlLog(self._work / name))
            self._trackers = self._open_trackers()
            self._closing.callback(self._trackers.close)
            self._advance = self._closing.enter_context(long_bar(f"stage {self._stage.name}", self._stage.steps))
            self._advance(self._done, "")
        # Before the first step, or after a step whose checkpoint was written without its probes.
        self._probe(self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def timed(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield `steps`. The clock of each starts when it is requested, so time between steps does not count.

        If a step is logged while the next one computes, the device's clock is used.
        """
        coming = iter(steps)
        while True:
            began = self._clock()
            try:
                ready = next(coming)
            except StopIteration:
                return
            self._times.append((began, self._clock()))
            yield ready

    def step(self, report: StepReport) -> None:
        """Log a finished step, and run validation and samples if they are due."""
        began, rows_came = self._times.popleft() if self._times else (self._logged, self._logged)
        now = self._clock()
        own_clock = now - max(began, self._logged)
        seconds = own_clock if report.seconds is None else rows_came - began + report.seconds
        self._logged = now
        self.phases.add("steps" if "first step" in self.phases.seconds else "first step", seconds)
        mfu = self._mfu.mfu(report.doc_lens, seconds)
        memory = peak_memory_gib(self._device)
        self._meter.add(seconds, mfu)
        if self._advance is not None:
            line = self._line(report, seconds, rows_came - began, mfu, memory)
            self._append(METRICS, [line])
            self._advance(1, self._meter.summary(report.step, report.loss, memory))
            self._trackers.numbers(report.step, _flat(line))
        self._probe(report.step)

    def _line(
        self, report: StepReport, seconds: float, data_seconds: float, mfu: float | None, memory: float
    ) -> dict[str, Any]:
        return {
            "step": report.step,
            "tokens": report.step * self._stage.batch_tokens,
            "loss": _finite(report.loss),
            "lr": report.lr,
            "grad_norm": _finite(report.grad_norm),
            "seconds": round(seconds, 4),
            "data_seconds": round(data_seconds, 4),
            "tokens_per_second": round(self._stage.batch_tokens / seconds, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gib": round(memory, 3),
            "skipped": report.skipped,
            "losses": {name: _finite(loss) for name, loss in report.losses.items()},
            **report.extra,
        }

    def probes(self, step: int) -> bool:
        """Return whether logging this step runs validation or samples."""
        stage = self._stage
        return any(config and is_due(config.every, step, stage.steps) for config in (stage.validation, stage.samples))

    def _probe(self, step: int) -> None:
        """Run validation and samples if due and not written yet. All ranks must call this; the leader writes."""
        probes, stage = self._probes, self._stage
        if probes is None:
            return
        if probes.validation and stage.validation and self._is_missing(VALIDATION, stage.validation.every, step):
            began = self._clock()
            with self.phases("validation"):
                found = probes.validation.measure(probes.model)
            self._log_validation(step, found | {"seconds": round(self._clock() - began, 4)})
        if probes.samples and stage.samples and self._is_missing(SAMPLES, stage.samples.every, step):
            with self.phases("samples"):
                written = probes.samples.write(probes.model)
            self._log_samples(step, written)

    def _log_names(self) -> list[str]:
        probes = self._probes
        return [
            METRICS,
            *([VALIDATION] if probes and probes.validation else []),
            *([SAMPLES] if probes and probes.samples else []),
        ]

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        # One write, so that the lines of a step are complete or absent.
        self._files[name].append("".join(json.dumps(line) + "\n" for line in lines))

    def _is_missing(self, name: str, every: int | None, step: int) -> bool:
        # Only a resumed stage can have it already; all ranks get the same answer.
        written = step == self._done and has_step(self._work / name, step)
        return is_due(every, step, self._stage.steps) and not written

    def _log_validation(self, step: int, found: dict[str, Any]) -> None:
        if self._advance is None:
            return
        self._append(VALIDATION, [{"step": step, "tokens": step * self._stage.batch_tokens, **found}])
        means = {bucket_name(bucket): bucket["value"] for bucket in found["buckets"] if bucket["n"]}
        text = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        if found["n"]:
            logger.info(f"stage {self._stage.name}: step {step}  validation loss {found['loss']:.3f}  ({text})")
            by_position = {f"validation/{name}": value for name, value in means.items()}
            self._trackers.numbers(step, {"validation/loss": found["loss"], **by_position})

    def _log_samples(self, step: int, written: list[dict[str, str]]) -> None:
        if self._advance is None:
            return
        self._append(SAMPLES, [{"step": step, **sample} for sample in written])
        for number, sample in enumerate(written):
            logger.info(
                f"stage {self._stage.name}: step {step}  {escape(sample['prompt'], 60)} → {escape(sample['text'])}"
            )
            self._trackers.text(step, f"samples/{number}", sample["prompt"] + sample["text"])


def build_logger(
    stage: StageConfig,
    model: Any,
    tokenizer: Any,
    work: Path,
    *,
    done: int,
    seed: int,
    rows: Mapping[str, Path],
    validation: Path | None,
    dist_context: DistContext | None = None,
) -> MetricsLogger:
    """Build the logger of a stage; `rows` are the training datasets, `validation` the held-out dataset."""
    device = compute_device(model)
    is_leader = dist_context is None or dist_context.is_leader
    devices = 1 if dist_context is None else dist_context.ranks.world_size
    validator = None
    if stage.validation:
        assert validation is not None, "a stage with validation needs its rows"
        mesh = None if dist_context is None else dist_context.mesh
        validator = build_validation(stage, validation, model, seed=seed, mesh=mesh)
        if is_leader:
            warn_if_trained_on(stage, validation, rows)
    samples = build_samples(stage, model, tokenizer) if stage.samples else None
    # `work` is <run>/stages/<name>.work.
    run = f"{work.absolute().parent.parent.name}/{stage.name}"
    settings = stage.model_dump(mode="json")
    return MetricsLogger(
        stage,
        work,
        done=done,
        device=device,
        mfu=MfuCounter(count_flops(model), peak_flops(device), devices),
        probes=Probes(model=model, validation=validator, samples=samples),
        open_trackers=lambda: build_trackers(stage.loggers, work, run=run, settings=settings, done=done),
        is_leader=is_leader,
    )


def copy_logs(work: Path, folder: Path) -> None:
    """Copy the logs into the folder that is published."""
    for name in (METRICS, VALIDATION, SAMPLES):
        if (work / name).is_file():
            shutil.copy(work / name, folder / name)
    # Uploaded W&B runs are no longer needed; offline runs are, for `wandb sync`.
    for path in [*work.glob(TENSORBOARD), *work.glob("wandb/offline-run-*")]:
        shutil.copytree(path, folder / path.relative_to(work))


def bucket_name(bucket: Mapping[str, Any]) -> str:
    return f"{format_size(bucket['from'])}-{format_size(bucket['to'])}"


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line for trackers, with losses by dataset under separate names."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return {f"train/{name}": value for name, value in numbers.items() if name != "step"} | {
        f"train/loss/{name}": value for name, value in line["losses"].items() if value is not None
    }


def _finite(value: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have, with None."""
    return value if math.isfinite(value) else None
