"""Points at which documents are split into chunks, for strategies that move chunks."""

from collections.abc import Callable
from typing import Literal

import numpy as np

Split = Literal["random", "equal"]


def random_points(draws: np.ndarray, lens: np.ndarray, hops: np.ndarray) -> np.ndarray:
    """Per document: hops - 1 sorted points in 1 … length - 1, uniform without replacement, then its length."""
    points = np.repeat(lens[:, None], draws.shape[1], axis=1)
    for number in range(draws.shape[1]):
        having = np.flatnonzero(hops > number + 1)
        found = points[having, : number + 1]
        point = 1 + (draws[having, number] * (lens[having] - 1 - number)).astype(np.int64)
        # The draw counts only free places: skip the taken ones, from the lowest on.
        for taken in range(number):
            point += point >= found[:, taken]
        found[:, number] = point
        points[having, : number + 1] = np.sort(found, axis=1)
    return points


def equal_points(draws: np.ndarray, lens: np.ndarray, hops: np.ndarray) -> np.ndarray:
    """Per document: hops - 1 points for pieces whose lengths differ by at most one token, then its length."""
    numbers = 1 + np.arange(draws.shape[1])
    points: np.ndarray = np.minimum(lens[:, None] * numbers // hops[:, None], lens[:, None])
    return points


# Arguments: float64[documents, most hops - 1] draws below 1, lengths and hops. Result: int64 of the draws' shape.
SPLIT_POINTS: dict[Split, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "random": random_points,
    "equal": equal_points,
}
