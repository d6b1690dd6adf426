"""Promise 3 with real kills: a stage whose process gets SIGKILL at random moments, again and again.

In: how many kills, a seed. Out: what differs from a stage that nothing happened to, and gaps of its ledger.
Price: one process that loads torch, from which all others are forked; each takes a second or so.
Run by itself it is that process: `python -m unspool.verification.interruptions FOLDER KILLS SEED DEVICE`
prints `Killed` as JSON.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.core.artifacts import publish
from unspool.core.rng import rng_for
from unspool.data.mixture import Mix
from unspool.data.packing.store import Row, RowWriter
from unspool.training.checkpoint.resume import OPTIMIZER, resume
from unspool.training.config import StageConfig
from unspool.training.loader import LEDGER, find_gaps, read_ledger
from unspool.training.loop import Training, run_steps
from unspool.training.metrics.logger import METRICS, MetricsLogger
from unspool.training.optim.updater import build_updater
from unspool.training.schedule import SpikeGuard
from unspool.training.stage import StageInputs, run_stage
from unspool.verification.case import LARGE, Case
from unspool.verification.families import FAMILIES, SHAPE, small_subjects
from unspool.verification.results import Measured, SkippedError, error_line
from unspool.verification.tolerance import EXACT
from unspool.verification.training_rows import build_row_sets

KILLS = 3
KILL_CONTEXT, KILL_SLOTS, KILL_STEPS = 32, 2, 10
KILL_STAGE = StageConfig(
    name="kill",
    context_length=KILL_CONTEXT,
    mix={"long": 0.6, "short": 0.4},
    tokens=KILL_STEPS * KILL_SLOTS * KILL_CONTEXT,
    batch_tokens=KILL_SLOTS * KILL_CONTEXT,
    lr=1e-3,
    checkpoint_every=1,
)
RESULT = ("model/model.safetensors", OPTIMIZER, LEDGER)


@dataclass(frozen=True)
class Killed:
    kills: int
    runs: int  # that were brought to their end, kills in between
    differing: list[str]
    gaps: list[str]
    repeatable: bool  # two runs that nothing happened to are the same


def killed(case: Case, *, kills: int) -> list[Measured]:
    if case.subject.name not in FAMILIES:
        raise SkippedError("is done with a small model: unspool verify --only killed")
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own: forks of one that has used a GPU, or threads, do not live long.
        command = [sys.executable, "-m", __spec__.name, folder, str(kills), str(case.seed), case.device.type]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(error_line(done.stderr) or f"exit {done.returncode}")
    found = Killed(**json.loads(done.stdout))
    if not found.repeatable:
        raise SkippedError("on this device two runs that nothing interrupts differ already, by the order of sums")
    told = f"{found.kills} kills, {found.runs} runs"
    return [
        Measured(
            quantity="bits",
            error=len(found.differing),
            tolerance=EXACT,
            detail=", ".join([told, *found.differing[:1]]),
        ),
        Measured(quantity="ledger", error=len(found.gaps), tolerance=EXACT, detail=", ".join([told, *found.gaps[:1]])),
    ]


def run_kills(folder: Path, *, kills: int, seed: int, device: torch.device) -> Killed:
    """Kill and begin again until there were so many kills; a run that ends before is compared, and another begun."""
    inputs = _inputs(folder, seed=seed)

    def run(name: str) -> Callable[[], None]:
        return lambda: run_stage(KILL_STAGE, inputs, folder / name / KILL_STAGE.name, seed=seed, device=device)

    seconds = _seconds(run("whole"))
    repeatable = True
    if device.type == "cuda":
        # By this one's time, since the first also compiles kernels: of kills by that, most would come too late.
        seconds = _seconds(run("again"))
        repeatable = not _differing_files(folder / "again", folder / "whole")
    rng = rng_for(seed, "verify", "kills")
    done, finished = 0, 0
    while done < kills:
        # From the very start to a little after the end, so that no moment is left out.
        if _killed_after(run(f"run-{finished}"), float(rng.uniform(0, 1.1 * seconds))):
            done += 1
        else:
            finished += 1
    _ended(run(f"run-{finished}"))
    runs = [folder / f"run-{number}" for number in range(finished + 1)]
    sizes = {name: len(rows) for name, rows in _kill_rows(seed).items()}
    return Killed(
        kills=done,
        runs=len(runs),
        differing=[f"{place.name}: {name}" for place in runs for name in _differing_files(place, folder / "whole")],
        gaps=[
            gap
            for place in runs
            for gap in find_gaps(read_ledger(place / KILL_STAGE.name / LEDGER), sizes, steps=KILL_STEPS)
        ],
        repeatable=repeatable,
    )


def _differing_files(found: Path, wanted: Path) -> list[str]:
    """Files of the result that are not the same bytes, and whatever else is left beside it."""
    different = [
        name
        for name in RESULT
        if (found / KILL_STAGE.name / name).read_bytes() != (wanted / KILL_STAGE.name / name).read_bytes()
    ]
    return different + [f"{path.name} was left behind" for path in found.iterdir() if path.name != KILL_STAGE.name]


def _kill_rows(seed: int) -> dict[str, list[Row]]:
    return build_row_sets(KILL_CONTEXT, vocabulary=SHAPE["vocab_size"], seed=seed)


def _inputs(folder: Path, *, seed: int) -> StageInputs:
    (subject,) = small_subjects(folder / "models", seed=seed, wide=False, names=["llama"])
    places = {}
    for name, rows in _kill_rows(seed).items():
        places[name] = folder / "datasets" / name
        with publish(places[name], kind="dataset", inputs={}, settings={}) as draft:
            with RowWriter(draft.folder, row_len=len(rows[0].tokens), masked=True) as writer:
                for row in rows:
                    writer.append(row)
            draft.counts = {"rows": len(rows)}
    return StageInputs(model=subject.ref, datasets=places)


def _ended(work: Callable[[], None]) -> None:
    _wait(_fork(work))


def _seconds(work: Callable[[], None]) -> float:
    """That it took until the end."""
    began = time.perf_counter()
    _ended(work)
    return time.perf_counter() - began


def _killed_after(work: Callable[[], None], seconds: float) -> bool:
    """Whether the process was still at work when it was killed."""
    child = _fork(work)
    time.sleep(seconds)
    os.kill(child.pid, signal.SIGKILL)
    return _wait(child) == -signal.SIGKILL


@dataclass(frozen=True)
class _Child:
    pid: int
    words: int  # what is read from says why it failed


def _wait(child: _Child) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
    with os.fdopen(child.words) as words:
        if code > 0:
            raise RuntimeError(f"a run that was not killed failed: {words.read()}")
    return code


def _fork(work: Callable[[], None]) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    words, mouth = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work()
            code = 0
        except BaseException as error:
            os.write(mouth, f"{type(error).__name__}: {error}".encode())
        finally:
            # Not sys.exit: nothing of the process that was forked may run twice.
            os._exit(code)
    os.close(mouth)
    return _Child(pid, words)


if __name__ == "__main__":
    place, count, number, kind = sys.argv[1:]
    outcome = run_kills(Path(place), kills=int(count), seed=int(number), device=torch.device(kind))
    print(json.dumps(asdict(outcome)))


# Promise 3: a run that is interrupted and resumed ends with the bits of one that never was.


CONTEXT, STEPS = 32, 6
# Before the first checkpoint, with one just being written, and between two.
CUT_AFTER = (1, 4, 5)


class _CutError(Exception):
    """Stands for the end of a process."""


class _CutMix(Mix):
    """Rows of the first `steps` steps; there are none after them."""

    last_step = STEPS

    def slot(self, index: int) -> list[tuple[str, int]]:
        if index >= self.last_step * SLOTS:
            raise _CutError
        return super().slot(index)


SLOTS = 2
STAGE = StageConfig(
    name="verify",
    context_length=CONTEXT,
    mix={"long": 0.6, "short": 0.4},
    tokens=STEPS * SLOTS * CONTEXT,
    batch_tokens=SLOTS * CONTEXT,
    lr=1e-3,
    checkpoint_every=2,
)


def resumed(case: Case) -> list[Measured]:
    if case.model.num_parameters() > LARGE:
        raise SkippedError("a model of this size is too slow to train again and again; small ones are checked")
    with tempfile.TemporaryDirectory() as name:
        whole = _run(case, Path(name) / "whole", cuts=())
        if case.device.type == "cuda" and _differing(whole, _run(case, Path(name) / "again", cuts=())):
            raise SkippedError("on this device two runs that nothing interrupts differ already, by the order of sums")
        cut = _run(case, Path(name) / "cut", cuts=CUT_AFTER)
        ledger = read_ledger(Path(name) / "cut" / LEDGER)
        sizes = {name: len(rows) for name, rows in _rows(case).items()}
        gaps = find_gaps(ledger, sizes, steps=STEPS)
        if ledger != read_ledger(Path(name) / "whole" / LEDGER):
            gaps.append("other rows than in the run that was never interrupted")
    differing = _differing(whole, cut)
    return [
        Measured(quantity="bits", error=len(differing), tolerance=EXACT, detail=", ".join(differing[:1])),
        Measured(quantity="ledger", error=len(gaps), tolerance=EXACT, detail=", ".join(gaps[:1])),
    ]


def _run(case: Case, work: Path, *, cuts: Sequence[int]) -> dict[str, Tensor]:
    """All that was trained, after a run that was cut off after each of these steps."""
    work.mkdir()
    for last_step in (*cuts, STEPS):
        model = copy.deepcopy(case.model)
        updater, guard = build_updater(STAGE, model), SpikeGuard(STAGE.guard)
        done = resume(work, updater, guard, logs=(LEDGER, METRICS), seed=case.seed, stage=STAGE.name)
        rows: Any = _rows(case)
        sizes = {name: len(of_set) for name, of_set in rows.items()}
        row_lens = {name: len(of_set[0].tokens) for name, of_set in rows.items()}
        mix = _CutMix(STAGE.mix, sizes, row_lens, CONTEXT, case.seed)
        mix.last_step = last_step
        training = Training(model, updater, guard, mix, rows, case.device)
        try:
            with MetricsLogger(STAGE, work, done=done, device=case.device, is_leader=False) as logger:
                run_steps(STAGE, training, work, done=done, logger=logger)
        except _CutError:
            assert last_step < STEPS
    return {name: tensor.detach().cpu().clone() for name, tensor in updater.state_tensors().items()}


def _rows(case: Case) -> dict[str, Any]:
    return build_row_sets(CONTEXT, vocabulary=case.model.config.vocab_size, seed=case.seed)


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    # Bits, not values: 0 and -0 differ, and something that is not a number equals itself.
    return [name for name, tensor in first.items() if tensor.numpy().tobytes() != second[name].numpy().tobytes()]
