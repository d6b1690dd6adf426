"""Where gold stands in `fixed` mode: every depth equally often.

In: the index of a question. Out: depths from 0 (start) to 1 (end).
Promise: 40 questions in a row meet each of 40 depths once, and any few in a row are spread over the whole.
"""

import numpy as np

# As many as RULER has for its essays.
GRID = 40
# Shares no factor with the grid, and takes neighbours far apart.
_STRIDE = 17


def target(index: int) -> float:
    return index * _STRIDE % GRID / (GRID - 1)


def parts(count: int, rng: np.random.Generator) -> list[float]:
    """One depth in each of `count` equal parts."""
    return [float(depth) for depth in (np.arange(count) + rng.random(count)) / count]


def place(depth: float, count: int) -> int:
    """Before which of `count` lines; `count` is after the last."""
    return round(depth * count)
