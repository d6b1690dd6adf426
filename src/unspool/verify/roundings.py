"""How far plain `transformers` is from the truth by rounding alone, over several ways to round.

In: a model as `transformers` loads it, in the precision of training, a step, the truth about it. Out: `Apart`, the
largest error of each kind. Elsewhere: what is allowed beside it, and why one way is not enough (tolerance.py).
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unspool.base.rng import rng_for
from unspool.verify.rows import Step
from unspool.verify.tolerance import DRAW_FROM, DRAWS
from unspool.verify.truth import Apart, Outcome, apart, batched_outcome, larger, plain_outcome


def usual_error(model: Any, step: Step, truth: Outcome, *, asked_only: bool) -> Apart:
    """Documents one at a time; if they are several rows also all in one batch, as products of larger matrices round
    otherwise."""
    found = apart(plain_outcome(model, step, asked_only=asked_only), truth)
    return found if len(step.rows) == 1 else larger(found, apart(batched_outcome(model, step), truth))


def fp32_error(model: Any, step: Step, truth: Outcome, *, seed: int) -> Apart:
    """The same and, where it is not far below what is allowed anyway, with sums in orders drawn by the seed."""
    found = usual_error(model, step, truth, asked_only=True)
    if max(found.loss, found.gradient, found.middle) < DRAW_FROM:
        return found
    for draw in range(DRAWS):
        with Reordered(rng_for(seed, "verify", "sums", step.name, draw)):
            found = larger(found, apart(batched_outcome(model, step), truth))
    return found


class Reordered(TorchFunctionMode):
    """Every product with a weight adds up its terms in a drawn order, as if channels were numbered otherwise.

    The same numbers, except for roundings. Those of the backward pass change as well, with the states it starts from.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._rng = rng

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        order = torch.from_numpy(self._rng.permutation(weight.shape[1])).to(weight.device)
        return F.linear(input.index_select(-1, order), weight.index_select(1, order), bias)
