"""Promise 2: loss and gradient of an optimizer step do not depend on how it is split, nor on the order of its rows.

Elsewhere: ranks (ranking.py).
"""

from collections.abc import Sequence

from unspool.base.rng import rng_for
from unspool.verify.case import Case
from unspool.verify.packing import worst
from unspool.verify.result import Measured
from unspool.verify.rows import NUM_ROWS
from unspool.verify.training import trained
from unspool.verify.truth import apart


def split(case: Case) -> list[Measured]:
    """Eight rows in micro-batches of one, four and eight; some rows ask for a tenth of their tokens only."""
    return _against_truth(case, [(count, range(NUM_ROWS)) for count in (1, 4, 8)])


def shuffled(case: Case) -> list[Measured]:
    """The same rows from the last to the first, and in an order drawn by the seed."""
    drawn = rng_for(case.seed, "verify", "order").permutation(NUM_ROWS).tolist()
    return _against_truth(case, [(1, range(NUM_ROWS)[::-1]), (2, drawn)])


def _against_truth(case: Case, ways: list[tuple[int, Sequence[int]]]) -> list[Measured]:
    """`ways`: rows in a micro-batch, and the order of all rows."""
    step, truth = case.steps["several"], case.truths["several"]
    found = [apart(trained(case.model, step, rows_at_once=count, order=order), truth) for count, order in ways]
    return worst(case, [("several", far) for far in found])
