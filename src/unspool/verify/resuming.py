"""Promise 3: a run that is interrupted and resumed ends with the bits of one that never was.

In this process, for every small model: a short stage, cut off after several of its steps and begun again each time
from what is on disk. Elsewhere: real kills of real processes (killing.py).
"""

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from unspool.data.mix import Mix
from unspool.train.config import StageConfig
from unspool.train.guard import Guard
from unspool.train.ledger import LEDGER, find_gaps, read_ledger
from unspool.train.loop import Training, run_steps
from unspool.train.optimizer import build_updater
from unspool.train.resume import resume
from unspool.train.watch import METRICS, Watch
from unspool.verify.case import LARGE, Case
from unspool.verify.result import Measured, SkippedError
from unspool.verify.rows import build_row_sets
from unspool.verify.tolerance import EXACT

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
    context=CONTEXT,
    mix={"long": 0.6, "short": 0.4},
    tokens=STEPS * SLOTS * CONTEXT,
    batch=SLOTS * CONTEXT,
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
        updater, guard = build_updater(STAGE, model), Guard(STAGE.guard)
        done = resume(work, updater, guard, growing=(LEDGER, METRICS), seed=case.seed, stage=STAGE.name)
        rows: Any = _rows(case)
        sizes = {name: len(of_set) for name, of_set in rows.items()}
        row_lens = {name: len(of_set[0].tokens) for name, of_set in rows.items()}
        mix = _CutMix(STAGE.mix, sizes, row_lens, CONTEXT, case.seed)
        mix.last_step = last_step
        training = Training(model, updater, guard, mix, rows, case.device)
        try:
            with Watch(STAGE, work, done=done, device=case.device, is_leader=False) as watch:
                run_steps(STAGE, training, work, done=done, watch=watch)
        except _CutError:
            assert last_step < STEPS
    return {name: tensor.detach().cpu().clone() for name, tensor in updater.state_tensors().items()}


def _rows(case: Case) -> dict[str, Any]:
    return build_row_sets(CONTEXT, vocabulary=case.model.config.vocab_size, seed=case.seed)


def _differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    # Bits, not values: 0 and -0 differ, and something that is not a number equals itself.
    return [name for name, tensor in first.items() if tensor.numpy().tobytes() != second[name].numpy().tobytes()]
