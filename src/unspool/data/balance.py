"""Give every rank the same work within an optimizer step.

In: what each row of the step costs, and the number of ranks. Out: which row is which rank's k-th micro-batch.
Promise: every rank gets the same number of rows; the k-th micro-batches of all ranks are alike (sorted by cost, as
ProLong sorts them), which is the best there is where ranks wait for each other in every micro-batch; and the
ranks' sums are close. In neither respect is it ever worse than taking the rows as they come.
How: sorted by cost, each run of `num_ranks` rows is one micro-batch of all ranks; who of them gets which is
decided by the balanced largest differencing method (Karmarkar and Karp's with equal numbers), then by swaps.
The step's loss and gradient are sums over all its rows, so the arrangement does not change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the cost of a token depends on."""

    num_layers: int
    attention_width: int  # query heads times their size
    num_params: int

    @property
    def linear(self) -> float:
        """FLOPs of a token in the forward pass without attention: one multiplication and addition a parameter."""
        return 2.0 * self.num_params

    @property
    def quadratic(self) -> float:
        """FLOPs of attention by a document's squared length: scores and sums of values, half of them masked."""
        return 2.0 * 2 / 2 * self.attention_width * self.num_layers


def row_cost(doc_lens: np.ndarray | Sequence[int], shape: ModelShape) -> float:
    """FLOPs of a row's forward pass; give it `attended_lens` (labels.py), since full rows are one document."""
    lens = np.asarray(doc_lens, dtype=np.float64)
    return float(shape.quadratic * (lens**2).sum() + shape.linear * lens.sum())


def arrange(costs: np.ndarray | Sequence[float], num_ranks: int) -> np.ndarray:
    """int64[num_ranks, rows per rank]: entry (r, k) is the row that rank r computes as its k-th micro-batch."""
    costs = np.asarray(costs, dtype=np.float64)
    assert len(costs) % num_ranks == 0, f"{len(costs)} rows do not divide among {num_ranks} ranks"
    as_given = np.arange(len(costs)).reshape(num_ranks, -1)
    if num_ranks == 1 or not len(costs):
        return as_given[:, np.argsort(-costs, kind="stable")]
    columns = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    arranged = _swap(costs, _difference(costs, columns))
    if costs[arranged].sum(axis=1).max() <= costs[as_given].sum(axis=1).max():
        return arranged
    # By luck the ranks were even closer. Sorting each one's rows keeps that and aligns the micro-batches.
    return np.take_along_axis(as_given, np.argsort(-costs[as_given], axis=1, kind="stable"), axis=1)


def imbalance(costs: np.ndarray, arranged: np.ndarray) -> tuple[float, float]:
    """Time lost to waiting, as time over that of equal work: if ranks wait once a step, and in every micro-batch."""
    work = costs[arranged]
    equal = work.sum() / len(work)
    return float(work.sum(axis=1).max() / equal), float(work.max(axis=0).sum() / equal)


def _difference(costs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Merge columns, those with the largest differences first, heavy sums with light ones, until one is left."""
    heap: list[tuple[float, int, np.ndarray, np.ndarray]] = []
    for number, rows in enumerate(columns):
        heappush(heap, (_minus_spread(costs[rows]), number, costs[rows], rows[:, None]))
    number = len(columns)
    while len(heap) > 1:
        _, _, sums, rows = heappop(heap)
        _, _, other_sums, other_rows = heappop(heap)
        heavy = np.argsort(-sums, kind="stable")
        light = np.argsort(other_sums, kind="stable")
        sums = sums[heavy] + other_sums[light]
        heappush(heap, (_minus_spread(sums), number, sums, np.hstack([rows[heavy], other_rows[light]])))
        number += 1
    rows = heap[0][3]
    # Merging mixed up the order of the columns; a row's column is its place in the sorted order.
    places = np.empty(columns.size, dtype=np.int64)
    places[columns.ravel()] = np.arange(columns.size) // columns.shape[1]
    return np.take_along_axis(rows, np.argsort(places[rows], axis=1), axis=1)


def _minus_spread(sums: np.ndarray) -> float:
    return float(sums.min() - sums.max())


def _swap(costs: np.ndarray, arranged: np.ndarray) -> np.ndarray:
    """Let the heaviest rank change rows of one column with others, while that helps both."""
    arranged = arranged.copy()
    for _ in range(arranged.size):
        work = costs[arranged]
        sums = work.sum(axis=1)
        heaviest = int(np.argmax(sums))
        # What the heaviest gives away by each swap; best is half of what separates the two ranks.
        given = work[heaviest] - work
        gap = (sums[heaviest] - sums)[:, None]
        worst_after = np.where(given > 0, np.maximum(gap - given, given), np.inf)
        gain = gap - worst_after
        rank, column = divmod(int(np.argmax(gain)), gain.shape[1])
        if gain[rank, column] <= 1e-9 * sums[heaviest]:
            break
        arranged[[heaviest, rank], column] = arranged[[rank, heaviest], column]
    return arranged
