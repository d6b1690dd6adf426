"""Promise 3 with real kills: a stage whose process gets SIGKILL at random moments, again and again.

In: how many kills, a seed. Out: what differs from a stage that nothing happened to, and gaps of its ledger.
Price: one process that loads torch, from which all others are forked; each takes a second or so.
Run by itself it is that process: `python -m unspool.verify.killing FOLDER KILLS SEED DEVICE` prints `Killed` as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from unspool.base.artefact import publish
from unspool.base.rng import rng_for
from unspool.data.store import Row, RowWriter
from unspool.train.config import StageConfig
from unspool.train.handover import OPTIMIZER
from unspool.train.ledger import LEDGER, find_gaps, read_ledger
from unspool.train.stage import StageInputs, run_stage
from unspool.verify.case import Case
from unspool.verify.result import Measured, SkippedError, error_line
from unspool.verify.rows import build_row_sets
from unspool.verify.subjects import FAMILIES, SHAPE, small_subjects
from unspool.verify.tolerance import EXACT

KILLS = 3
CONTEXT, SLOTS, STEPS = 32, 2, 10
STAGE = StageConfig(
    name="kill",
    context=CONTEXT,
    mix={"long": 0.6, "short": 0.4},
    tokens=STEPS * SLOTS * CONTEXT,
    batch=SLOTS * CONTEXT,
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
        return lambda: run_stage(STAGE, inputs, folder / name / STAGE.name, seed=seed, device=device)

    seconds = _seconds(run("whole"))
    repeatable = True
    if device.type == "cuda":
        # By this one's time, since the first also compiles kernels: of kills by that, most would come too late.
        seconds = _seconds(run("again"))
        repeatable = not _differing(folder / "again", folder / "whole")
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
    sizes = {name: len(rows) for name, rows in _rows(seed).items()}
    return Killed(
        kills=done,
        runs=len(runs),
        differing=[f"{place.name}: {name}" for place in runs for name in _differing(place, folder / "whole")],
        gaps=[gap for place in runs for gap in find_gaps(read_ledger(place / STAGE.name / LEDGER), sizes, steps=STEPS)],
        repeatable=repeatable,
    )


def _differing(found: Path, wanted: Path) -> list[str]:
    """Files of the result that are not the same bytes, and whatever else is left beside it."""
    different = [
        name for name in RESULT if (found / STAGE.name / name).read_bytes() != (wanted / STAGE.name / name).read_bytes()
    ]
    return different + [f"{path.name} was left behind" for path in found.iterdir() if path.name != STAGE.name]


def _rows(seed: int) -> dict[str, list[Row]]:
    return build_row_sets(CONTEXT, vocabulary=SHAPE["vocab_size"], seed=seed)


def _inputs(folder: Path, *, seed: int) -> StageInputs:
    (subject,) = small_subjects(folder / "models", seed=seed, wide=False, names=["llama"])
    places = {}
    for name, rows in _rows(seed).items():
        places[name] = folder / "rows" / name
        with publish(places[name], kind="rows", inputs={}, settings={}) as draft:
            with RowWriter(draft.folder, row_len=len(rows[0].tokens), masked=True) as writer:
                for row in rows:
                    writer.append(row)
            draft.counts = {"rows": len(rows)}
    return StageInputs(model=subject.ref, rows=places)


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
