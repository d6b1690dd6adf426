"""Everything a person watches while a stage trains.

In: a report of each step. Out: `metrics.jsonl`, `validation.jsonl` and `samples.jsonl` in the work folder, a progress
bar (or a line now and then where there is no terminal), trackers.
Promise: a resumed stage goes on with files that end at its checkpoint; nothing here changes what is trained.
Elsewhere: speed and ETA (meter.py), MFU (flops.py), TensorBoard and W&B (trackers.py).
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from unspool.core.artifacts import write_atomic
from unspool.core.progress import Advance, long_bar
from unspool.core.sizes import format_size
from unspool.training.config import StageConfig, is_due
from unspool.training.metrics import validation as samples_module
from unspool.training.metrics import validation as validation_module
from unspool.training.metrics.flops import Meter, Speed, count_flops, peak_flops, peak_memory_gib
from unspool.training.metrics.trackers import TENSORBOARD, Trackers, build_trackers
from unspool.training.metrics.validation import (
    Samples,
    Validation,
    build_samples,
    build_validation,
    shown,
    warn_if_trained_on,
)
from unspool.training.parallel.dtensor import computing_device
from unspool.training.parallel.mesh import Team

logger = logging.getLogger(__name__)

# A file that grows by a line at a time and survives a full disk.


class GrowingFile:
    """Opened to append; `content` is all of it, also what is not on disk yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Unbuffered, so that a write that fails leaves nothing to be written again behind our back.
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
        had_waited = bool(self._waiting)
        self._waiting += line.encode()
        try:
            self._write()
        except OSError as error:
            if not had_waited:
                logger.warning(
                    f"{self._path.name} cannot be written now ({error.strerror or error}); its lines wait in memory"
                )

    @property
    def content(self) -> bytes:
        return self._path.read_bytes()[: self._size] + self._waiting

    def _write(self) -> None:
        try:
            while self._waiting:
                written = self._file.write(self._waiting) or 0
                self._waiting = self._waiting[written:]
                self._size += written
        except OSError:
            # Half a line may have been written: it is taken back and waits with the rest.
            self._take_back_half_a_line()
            raise

    def _take_back_half_a_line(self) -> None:
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        self._waiting = content[whole:] + self._waiting
        self._file.truncate(whole)
        self._size = whole


# JSON lines that each name the step they belong to, cut back to a checkpoint.


def keep_lines(path: Path, done: int) -> None:
    """Drop lines of steps after `done`, which will be made again, and a last one that a kill cut short."""
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
VALIDATION = validation_module.VALIDATION_FILE
SAMPLES = samples_module.SAMPLES_FILE
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step, as the loop knows it."""

    step: int
    loss: float
    losses: Mapping[str, float]  # by rows set
    lr: float
    grad_norm: float
    doc_lens: Sequence[int]  # of all documents of the step that attend to themselves
    skipped: bool = False  # the weights were left as they are
    more: Mapping[str, Any] = field(default_factory=dict)  # further keys of the line


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What is asked of the model itself, now and then."""

    model: Any
    validation: Validation | None = None
    samples: Samples | None = None


class Watch:
    """`with Watch(...) as watch`: `for step, batches in watch.timed(steps)`, then `watch.step(report)`."""

    def __init__(
        self,
        stage: StageConfig,
        work: Path,
        *,
        done: int,
        device: torch.device,
        speed: Speed | None = None,
        looks: Looks | None = None,
        open_trackers: Callable[[], Trackers] = lambda: Trackers({}),
        is_leader: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stage, self._work, self._done, self._device = stage, work, done, device
        self._speed, self._looks = speed or Speed(), looks
        self._open_trackers, self._is_leader, self._clock = open_trackers, is_leader, clock
        self._meter = Meter(steps=stage.steps, batch=stage.batch_tokens, clock=clock)
        self._began = self._rows_came = clock()
        self._trackers = Trackers({})
        self._advance: Advance | None = None
        self._files: dict[str, GrowingFile] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        if self._is_leader:
            for name in self._growing():
                keep_lines(self._work / name, self._done)
                self._files[name] = self._closing.enter_context(GrowingFile(self._work / name))
            self._trackers = self._open_trackers()
            self._closing.callback(self._trackers.close)
            self._advance = self._closing.enter_context(long_bar(f"stage {self._stage.name}", self._stage.steps))
            self._advance(self._done, "")
        # Before the first step, or after one whose checkpoint was written and this was not.
        self._look(self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    @property
    def metrics(self) -> bytes:
        """All of `metrics.jsonl`, for a checkpoint; nothing where another process writes it."""
        return self._files[METRICS].content if self._files else b""

    def timed(self, steps: Iterable[T]) -> Iterator[T]:
        """`steps`, with the clock of each started when it is asked for: what comes between steps is not theirs."""
        coming = iter(steps)
        while True:
            self._began = self._clock()
            try:
                ready = next(coming)
            except StopIteration:
                return
            self._rows_came = self._clock()
            yield ready

    def step(self, report: StepReport, *, look: bool = True) -> None:
        """The step is over: write it down, show it, and look at the model where that is due.

        Without `look`, for a stage that is asked to stop, that waits until it is taken up again.
        """
        seconds = self._clock() - self._began
        mfu = self._speed.mfu(report.doc_lens, seconds)
        memory = peak_memory_gib(self._device)
        self._meter.add(seconds, mfu)
        if self._advance is not None:
            line = self._line(report, seconds, mfu, memory)
            self._append(METRICS, [line])
            self._advance(1, self._meter.note(report.step, report.loss, memory))
            self._trackers.numbers(report.step, _flat(line))
        if look:
            self._look(report.step)

    def _line(self, report: StepReport, seconds: float, mfu: float | None, memory: float) -> dict[str, Any]:
        return {
            "step": report.step,
            "tokens": report.step * self._stage.batch_tokens,
            "loss": _finite(report.loss),
            "lr": report.lr,
            "grad_norm": _finite(report.grad_norm),
            "seconds": round(seconds, 4),
            "data_seconds": round(self._rows_came - self._began, 4),
            "tokens_per_second": round(self._stage.batch_tokens / seconds, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "memory_gib": round(memory, 3),
            "skipped": report.skipped,
            "losses": {name: _finite(loss) for name, loss in report.losses.items()},
            **report.more,
        }

    def _look(self, step: int) -> None:
        """Validation and samples, if they are due and not written yet. Every process takes part, one writes."""
        looks, stage = self._looks, self._stage
        if looks is None:
            return
        if looks.validation and stage.validation and self._is_missing(VALIDATION, stage.validation.every, step):
            began = self._clock()
            found = looks.validation.measure(looks.model)
            self._tell_validation(step, found | {"seconds": round(self._clock() - began, 4)})
        if looks.samples and stage.samples and self._is_missing(SAMPLES, stage.samples.every, step):
            self._tell_samples(step, looks.samples.write(looks.model))

    def _growing(self) -> list[str]:
        looks = self._looks
        return [
            METRICS,
            *([VALIDATION] if looks and looks.validation else []),
            *([SAMPLES] if looks and looks.samples else []),
        ]

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        # At once, so that what belongs to a step is there or not.
        self._files[name].append("".join(json.dumps(line) + "\n" for line in lines))

    def _is_missing(self, name: str, every: int | None, step: int) -> bool:
        # Only a stage that is taken up again can have it already; all processes answer alike, whoever writes it.
        written = step == self._done and has_step(self._work / name, step)
        return is_due(every, step, self._stage.steps) and not written

    def _tell_validation(self, step: int, found: dict[str, Any]) -> None:
        if self._advance is None:
            return
        self._append(VALIDATION, [{"step": step, "tokens": step * self._stage.batch_tokens, **found}])
        means = {span_name(bucket): bucket["value"] for bucket in found["buckets"] if bucket["n"]}
        shown_means = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        if found["n"]:
            logger.info(f"stage {self._stage.name}: step {step}  validation loss {found['loss']:.3f}  ({shown_means})")
            by_place = {f"validation/{name}": value for name, value in means.items()}
            self._trackers.numbers(step, {"validation/loss": found["loss"], **by_place})

    def _tell_samples(self, step: int, written: list[dict[str, str]]) -> None:
        if self._advance is None:
            return
        self._append(SAMPLES, [{"step": step, **sample} for sample in written])
        for number, sample in enumerate(written):
            logger.info(
                f"stage {self._stage.name}: step {step}  {shown(sample['prompt'], 60)} → {shown(sample['text'])}"
            )
            self._trackers.text(step, f"samples/{number}", sample["prompt"] + sample["text"])


def build_watch(
    stage: StageConfig,
    model: Any,
    tokenizer: Any,
    work: Path,
    *,
    done: int,
    seed: int,
    rows: Mapping[str, Path],
    validation: Path | None,
    team: Team | None = None,
) -> Watch:
    """`rows` are those trained on, `validation` those looked at; the ranks of `team` share a step's documents."""
    device = computing_device(model)
    is_leader = team is None or team.is_leader
    devices = 1 if team is None else team.ranks.world_size
    looked_at = None
    if stage.validation:
        assert validation is not None, "a stage with validation was not told where its rows are"
        looked_at = build_validation(stage, validation, model, seed=seed, mesh=team.mesh if team else None)
        if is_leader:
            warn_if_trained_on(stage, validation, rows)
    written = build_samples(stage, model, tokenizer) if stage.samples else None
    # stages/<name>.work lies in the folder of the run.
    run = f"{work.absolute().parent.parent.name}/{stage.name}"
    settings = stage.model_dump(mode="json")
    return Watch(
        stage,
        work,
        done=done,
        device=device,
        speed=Speed(count_flops(model), peak_flops(device), devices),
        looks=Looks(model=model, validation=looked_at, samples=written),
        open_trackers=lambda: build_trackers(stage.loggers, work, run=run, settings=settings, done=done),
        is_leader=is_leader,
    )


def keep_watched(work: Path, folder: Path) -> None:
    """Copy what was written while watching into the folder that is published."""
    for name in (METRICS, VALIDATION, SAMPLES):
        if (work / name).is_file():
            shutil.copy(work / name, folder / name)
    # What W&B has sent is not needed any more; what it keeps for `wandb sync` is.
    for path in [*work.glob(TENSORBOARD), *work.glob("wandb/offline-run-*")]:
        shutil.copytree(path, folder / path.relative_to(work))


def span_name(bucket: Mapping[str, Any]) -> str:
    return f"{format_size(bucket['from'])}-{format_size(bucket['to'])}"


def _flat(line: Mapping[str, Any]) -> dict[str, float]:
    """What trackers can draw: the numbers of a line, those of rows sets under their names."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return {f"train/{name}": value for name, value in numbers.items() if name != "step"} | {
        f"train/loss/{name}": value for name, value in line["losses"].items() if value is not None
    }


def _finite(value: float) -> float | None:
    """What is not a number has none in JSON either."""
    return value if math.isfinite(value) else None
