"""Promise 2: loss and gradient of an optimizer step do not depend on how it is split, nor on the order of its rows.

Ranks, FSDP, Ulysses and ring attention belong here too, once there are several devices: each is one more check that
compares its outcome with the truth of the step `several`.
"""

from unspool.verify.case import Case
from unspool.verify.packing import worst
from unspool.verify.result import Measured
from unspool.verify.training import trained
from unspool.verify.truth import apart


def split(case: Case) -> list[Measured]:
    """Four rows in micro-batches of one, two and four; some rows ask for a tenth of their tokens only."""
    step, truth = case.steps["several"], case.truths["several"]
    found = [apart(trained(case.model, step, rows_at_once=count), truth) for count in (1, 2, 4)]
    return worst(case, [("several", far) for far in found])


def shuffled(case: Case) -> list[Measured]:
    """The same rows in another order."""
    step, truth = case.steps["several"], case.truths["several"]
    found = apart(trained(case.model, step, rows_at_once=2, order=(2, 0, 3, 1)), truth)
    return worst(case, [("several", found)])
