"""What training makes of a step: the same code as a stage runs, with the gradient caught instead of applied."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unspool.data.store import Row
from unspool.train.config import StageConfig
from unspool.train.loader import build_step
from unspool.train.step import train_step
from unspool.verify.rows import Step, only_document
from unspool.verify.truth import ROW, Outcome, gradients, summed_gradients


class _Catch:
    """Stands where the updater stands, and adds up the gradient as that does."""

    def __init__(self, model: Any, sums: dict[str, Tensor]) -> None:
        self._model, self._sums = model, sums
        self.grads: dict[str, Tensor] = {}

    def begin(self, lr: float) -> None:
        self._sums.clear()

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        if is_good:
            self.grads = gradients(self._model, self._sums)
        return 0.0


def trained(model: Any, step: Step, *, rows_at_once: int = 1, order: Sequence[int] | None = None) -> Outcome:
    """Loss and gradient of the whole step, `rows_at_once` in each micro-batch."""
    loss, grads = _train(model, step.rows, rows_at_once=rows_at_once, order=order)
    return Outcome({ROW: loss}, {ROW: grads})


def trained_document(model: Any, step: Step, number: int, *, gradient: bool) -> Outcome:
    """Loss and, if asked for, gradient of one document, packed with the others."""
    (row,) = step.rows
    loss, grads = _train(model, (only_document(row, number),))
    name = f"document {number}"
    return Outcome({name: loss}, {name: grads} if gradient else {})


def _train(
    model: Any, rows: Sequence[Row], *, rows_at_once: int = 1, order: Sequence[int] | None = None
) -> tuple[float, dict[str, Tensor]]:
    context = len(rows[0].tokens)
    stage = StageConfig(
        name="verify",
        context=context,
        mix={"rows": 1.0},
        tokens=context * len(rows),
        batch=context * len(rows),
        micro_batch=context * rows_at_once,
        lr=1.0,
    )
    row_sets: Any = {"rows": rows}
    picks = [[("rows", index)] for index in order or range(len(rows))]
    with summed_gradients(model) as sums:
        catch = _Catch(model, sums)
        result = train_step(model, catch, build_step(stage, row_sets, picks), lr=stage.lr)
    return result.loss, catch.grads
