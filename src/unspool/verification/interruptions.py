"""Promise 3: a resumed run ends with the same bits as an uninterrupted run.

As a program, `python -m unspool.verification.interruptions FOLDER KILLS SEED DEVICE` kills and restarts runs, and
prints `KillResult` as JSON.
"""

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.core.artifacts import publish
from unspool.core.rng import rng_for
from unspool.data.mixture import Mix
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowWriter
from unspool.training.checkpoint.resume import OPTIMIZER, resume
from unspool.training.config import StageConfig
from unspool.training.loader import LEDGER, find_gaps, read_ledger
from unspool.training.loop import Training, run_steps
from unspool.training.metrics.logger import METRICS, MetricsLogger
from unspool.training.optim.updater import build_updater
from unspool.training.schedule import SpikeGuard
from unspool.training.stage import StageInputs, run_stage
from unspool.verification.case import LARGE_MODEL, Case, Measured, SkippedError, error_line
from unspool.verification.fixtures import FAMILIES, SHAPE, build_row_sets, build_small_models
from unspool.verification.tolerance import EXACT

KILLS = 3
CONTEXT, ROWS_PER_STEP = 32, 2
STEPS, KILL_STEPS = 6, 10
# Before the first checkpoint, while a checkpoint is written, and between two checkpoints.
INTERRUPT_AFTER = (1, 4, 5)
RESULT_FILES = ("model/model.safetensors", OPTIMIZER, LEDGER)
NOT_REPEATABLE = "two uninterrupted runs already differ on this device, because its order of summation varies"


def _stage(name: str, *, steps: int, checkpoint_every: int) -> StageConfig:
    return StageConfig(
        name=name,
        context_length=CONTEXT,
        mix={"long": 0.6, "short": 0.4},
        tokens=steps * ROWS_PER_STEP * CONTEXT,
        batch_tokens=ROWS_PER_STEP * CONTEXT,
        lr=1e-3,
        checkpoint_every=checkpoint_every,
    )


STAGE = _stage("verify", steps=STEPS, checkpoint_every=2)
KILL_STAGE = _stage("kill", steps=KILL_STEPS, checkpoint_every=1)


# Interrupted in this process


class _InterruptedError(Exception):
    """Simulates the end of a process."""


class _InterruptedMix(Mix):
    """Has rows only for the first `last_step` steps."""

    last_step = STEPS

    def slot(self, index: int) -> list[tuple[str, int]]:
        if index >= self.last_step * ROWS_PER_STEP:
            raise _InterruptedError
        return super().slot(index)


def check_resume(case: Case) -> list[Measured]:
    """Compare a stage that is interrupted several times with an uninterrupted stage."""
    if case.model.num_parameters() > LARGE_MODEL:
        raise SkippedError("training a model of this size several times is too slow; only small models run this check")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = _run(case, folder / "whole", interrupt_after=())
        if case.device.type == "cuda" and _differing_tensors(whole, _run(case, folder / "again", interrupt_after=())):
            raise SkippedError(NOT_REPEATABLE)
        resumed = _run(case, folder / "resumed", interrupt_after=INTERRUPT_AFTER)
        ledger = read_ledger(folder / "resumed" / LEDGER)
        gaps = find_gaps(ledger, {name: len(rows) for name, rows in _rows(case).items()}, steps=STEPS)
        if ledger != read_ledger(folder / "whole" / LEDGER):
            gaps.append("trained rows differ from the uninterrupted run")
    return _measured(_differing_tensors(whole, resumed), gaps)


def _measured(differing: list[str], gaps: list[str], *details: str) -> list[Measured]:
    return [
        Measured(quantity=quantity, error=len(found), tolerance=EXACT, detail=", ".join([*details, *found[:1]]))
        for quantity, found in (("bits", differing), ("ledger", gaps))
    ]


def _run(case: Case, work: Path, *, interrupt_after: Sequence[int]) -> dict[str, Tensor]:
    """All trained tensors of a run that is interrupted after each of these steps."""
    work.mkdir()
    for last_step in (*interrupt_after, STEPS):
        model = copy.deepcopy(case.model)
        updater, guard = build_updater(STAGE, model), SpikeGuard(STAGE.guard)
        done = resume(work, updater, guard, logs=(LEDGER, METRICS), seed=case.seed, stage=STAGE.name)
        rows: Any = _rows(case)
        sizes = {name: len(of_set) for name, of_set in rows.items()}
        row_lens = {name: len(of_set[0].tokens) for name, of_set in rows.items()}
        mix = _InterruptedMix(STAGE.mix, sizes, row_lens, CONTEXT, case.seed)
        mix.last_step = last_step
        training = Training(model, updater, guard, mix, rows, case.device)
        try:
            with MetricsLogger(STAGE, work, done=done, device=case.device, is_leader=False) as metrics:
                run_steps(STAGE, training, work, done=done, metrics=metrics)
        except _InterruptedError:
            assert last_step < STEPS
    return {name: tensor.detach().cpu().clone() for name, tensor in updater.state_tensors().items()}


def _rows(case: Case) -> dict[str, Any]:
    return build_row_sets(CONTEXT, vocabulary=case.model.config.vocab_size, seed=case.seed)


def _differing_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    # Compare bits, not values: 0 and -0 differ, and NaN equals itself.
    return [name for name, tensor in first.items() if tensor.numpy().tobytes() != second[name].numpy().tobytes()]


# Killed with SIGKILL at random moments


@dataclass(frozen=True)
class KillResult:
    kills: int
    runs: int  # completed runs
    differing: list[str]
    gaps: list[str]
    repeatable: bool  # True if two runs without kills are equal


def check_kills(case: Case, *, kills: int) -> list[Measured]:
    """Compare a stage whose process is killed at random moments and restarted with an uninterrupted stage."""
    if case.spec.name not in FAMILIES:
        raise SkippedError("needs a small model; run `unspool verify --only sigkill` without a model")
    with tempfile.TemporaryDirectory() as folder:
        # Use a separate process: forking a process that has used a GPU or threads is unsafe.
        command = [sys.executable, "-m", __spec__.name, folder, str(kills), str(case.seed), case.device.type]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(error_line(done.stderr) or f"exit code {done.returncode}")
    found = KillResult(**json.loads(done.stdout))
    if not found.repeatable:
        raise SkippedError(NOT_REPEATABLE)
    return _measured(found.differing, found.gaps, f"{found.kills} kills, {found.runs} runs")


def run_kills(folder: Path, *, kills: int, seed: int, device: torch.device) -> KillResult:
    """Kill and restart runs until `kills` kills have happened. Compare each completed run, then start another."""
    inputs = _inputs(folder, seed=seed)

    def run(name: str) -> Callable[[], Any]:
        return lambda: run_stage(KILL_STAGE, inputs, folder / name / KILL_STAGE.name, seed=seed, device=device)

    def seconds_of(name: str) -> float:
        began = time.perf_counter()
        _wait(*_fork(run(name)))
        return time.perf_counter() - began

    seconds = seconds_of("whole")
    repeatable = True
    if device.type == "cuda":
        # The first run also compiles kernels, so its duration would place most kills too late.
        seconds = seconds_of("again")
        repeatable = not _differing_files(folder / "again", folder / "whole")
    rng = rng_for(seed, "verify", "kills")
    done, finished = 0, 0
    while done < kills:
        # From the start to shortly after the end, so that a kill can hit every moment.
        if _kill_after(run(f"run-{finished}"), float(rng.uniform(0, 1.1 * seconds))):
            done += 1
        else:
            finished += 1
    _wait(*_fork(run(f"run-{finished}")))
    runs = [folder / f"run-{number}" for number in range(finished + 1)]
    sizes = {name: len(rows) for name, rows in _kill_rows(seed).items()}
    ledgers = [read_ledger(place / KILL_STAGE.name / LEDGER) for place in runs]
    return KillResult(
        kills=done,
        runs=len(runs),
        differing=[f"{place.name}: {name}" for place in runs for name in _differing_files(place, folder / "whole")],
        gaps=[gap for ledger in ledgers for gap in find_gaps(ledger, sizes, steps=KILL_STEPS)],
        repeatable=repeatable,
    )


def _differing_files(found: Path, wanted: Path) -> list[str]:
    """Result files that differ, and leftover files."""
    different = [
        name
        for name in RESULT_FILES
        if (found / KILL_STAGE.name / name).read_bytes() != (wanted / KILL_STAGE.name / name).read_bytes()
    ]
    return different + [f"{path.name} is a leftover file" for path in found.iterdir() if path.name != KILL_STAGE.name]


def _kill_rows(seed: int) -> dict[str, list[Row]]:
    return build_row_sets(CONTEXT, vocabulary=SHAPE["vocab_size"], seed=seed)


def _inputs(folder: Path, *, seed: int) -> StageInputs:
    (spec,) = build_small_models(folder / "models", seed=seed, wide=False, names=["llama"])
    places = {}
    for name, rows in _kill_rows(seed).items():
        places[name] = folder / "datasets" / name
        with publish(places[name], kind="dataset", inputs={}, settings={}) as draft:
            with RowWriter(draft.folder, row_len=len(rows[0].tokens), masked=True) as writer:
                for row in rows:
                    writer.append(row)
            draft.counts = {"rows": len(rows)}
    return StageInputs(model=spec.ref, datasets=places)


def _kill_after(work: Callable[[], None], seconds: float) -> bool:
    """Kill the process after some seconds. Returns whether it was still running."""
    process, errors = _fork(work)
    time.sleep(seconds)
    process.kill()
    return _wait(process, errors) == -signal.SIGKILL


def _wait(process: ForkProcess, errors: Connection) -> int:
    process.join()
    with errors:
        code = process.exitcode
        assert code is not None
        if code > 0:
            raise RuntimeError(f"an uninterrupted run failed: {errors.recv()}")
    return code


def _fork(work: Callable[[], None]) -> tuple[ForkProcess, Connection]:
    """Start a process. Returns it with a connection that receives its error."""
    reader, writer = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=_report_error, args=(work, writer))
    process.start()
    writer.close()
    return process, reader


def _report_error(work: Callable[[], None], errors: Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        work()
    except BaseException as error:
        errors.send(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    place, count, number, kind = sys.argv[1:]
    outcome = run_kills(Path(place), kills=int(count), seed=int(number), device=torch.device(kind))
    print(json.dumps(asdict(outcome)))
