"""The order of training rows as a pure function of seed and slot, with equal work for all ranks.

A slot is `context_length` tokens, filled by rows of one dataset. Step s of n slots takes slots s·n to (s+1)·n − 1,
whichever rank computes them. Finding a slot does not need earlier slots. After any number of slots, each dataset has
had its share to within one slot, and all its rows are used before one repeats. Shares that do not repeat within PERIOD
slots are rounded to 1 / PERIOD.

Rows may be shorter than the context length, for length curricula. At a context length of 512K, `{repos-512k: 0.5,
repos-64k: 0.5}` trains on 512K tokens of one repository in half of the slots and on eight documents of 64K in the
others. Each document attends only to itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import lcm

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size

# Maximum number of slots after which the pattern of datasets repeats.
PERIOD = 10_000
# Up to this number, repeated text is almost as good as new; beyond it, the gain falls (Muennighoff et al. 2023).
MOST_EPOCHS = 4.0


class Mix:
    """The schedule of one stage. `weights`, `sizes` (rows) and `row_lens` are by dataset.

    Stages with the same seed draw a dataset's rows in the same order unless they pass their names as `stage`.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        sizes: Mapping[str, int],
        row_lens: Mapping[str, int],
        context: int,
        seed: int,
        stage: str = "",
    ) -> None:
        self._names = sorted(weights)
        for name in self._names:
            if context % row_lens[name]:
                raise ConfigError(
                    f"rows {name} have {format_size(row_lens[name])} tokens, which does not divide the stage's "
                    f"context length of {format_size(context)}; whole rows must fill a context."
                )
            if not sizes[name]:
                raise ConfigError(f"rows {name} hold no row; remove the dataset from the mix, or add text to it.")
        self._sizes = sizes
        self._seed = seed
        # Without a name, the generator's key and the order are those of versions before stages had names.
        self._purpose = ("mix", stage) if stage else ("mix",)
        self._rows_per_slot = {name: context // row_lens[name] for name in self._names}
        self._quotas = _quotas([weights[name] for name in self._names])
        self._period = sum(self._quotas)
        self._pattern, self._earlier = _pattern(self._quotas)
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    def slot(self, index: int) -> list[tuple[str, int]]:
        """Return the rows of slot `index`: (dataset, row index)."""
        period, inner = divmod(index, self._period)
        number = int(self._pattern[inner])
        name = self._names[number]
        use = (period * self._quotas[number] + int(self._earlier[inner])) * self._rows_per_slot[name]
        return [(name, self._row(name, use + offset)) for offset in range(self._rows_per_slot[name])]

    def epochs(self, num_slots: int) -> dict[str, float]:
        """Return the number of epochs of each dataset in the first `num_slots` slots."""
        periods, inner = divmod(num_slots, self._period)
        counts = np.bincount(self._pattern[:inner], minlength=len(self._names))
        return {
            name: (periods * quota + int(count)) * self._rows_per_slot[name] / self._sizes[name]
            for name, quota, count in zip(self._names, self._quotas, counts, strict=True)
        }

    def _row(self, name: str, use: int) -> int:
        epoch, place = divmod(use, self._sizes[name])
        if (name, epoch) not in self._orders:
            # A batch can span two epochs of a dataset; older epochs are not needed again.
            for key in [key for key in self._orders if key[0] == name and abs(key[1] - epoch) > 1]:
                del self._orders[key]
            self._orders[name, epoch] = rng_for(self._seed, *self._purpose, name, epoch).permutation(self._sizes[name])
        return int(self._orders[name, epoch][place])


def epoch_warnings(epochs: Mapping[str, float], most: float = MOST_EPOCHS) -> list[str]:
    """Return a warning for each dataset that repeats more than `most` times; `epochs` is `Mix.epochs` of a stage."""
    return [
        f"rows {name} are repeated {count:.3g} times, and repetitions beyond {most:g} add little: "
        f"add text, or use a smaller share."
        for name, count in epochs.items()
        if count > most
    ]


def _quotas(weights: list[float]) -> list[int]:
    """Whole numbers of slots in proportion, at least 1 each: exact if PERIOD slots suffice, else summing to PERIOD."""
    assert len(weights) <= PERIOD
    parts = [Fraction(str(weight)) for weight in weights]
    shares = [part / sum(parts) for part in parts]
    period = lcm(*(share.denominator for share in shares))
    if period <= PERIOD:
        return [int(share * period) for share in shares]
    return _rounded_quotas(weights)


def _rounded_quotas(weights: list[float]) -> list[int]:
    exact = np.array(weights) / sum(weights) * PERIOD
    quotas = np.maximum(1, np.floor(exact)).astype(int)
    while (missing := PERIOD - int(quotas.sum())) != 0:
        change = int(np.sign(missing))
        # The dataset with the largest error; one that has a single slot keeps it.
        error = np.where((quotas > 1) | (change > 0), change * (exact - quotas), -np.inf)
        quotas[int(np.argmax(error))] += change
    return [int(quota) for quota in quotas]


def _pattern(quotas: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return each slot's dataset in a period, and the number of earlier slots of that dataset.

    The j-th slot of a dataset is due between j · period / quota and (j + 1) · period / quota. Earliest deadline first
    never misses a deadline, because the rates sum to 1. So every dataset stays within one slot of its share after any
    number of slots. Serving the largest deficit would not guarantee this: with many datasets it can lag by more.
    """
    period = sum(quotas)
    pattern = np.empty(period, dtype=np.int32)
    earlier = np.empty(period, dtype=np.int64)
    served = [0] * len(quotas)
    for slot in range(period):
        due = [number for number, quota in enumerate(quotas) if served[number] * period // quota <= slot]
        number = min(due, key=lambda number: (-(-(served[number] + 1) * period // quotas[number]), number))
        pattern[slot], earlier[slot] = number, served[number]
        served[number] += 1
    return pattern, earlier


# Give every rank the same work in each optimizer step.


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that determine the cost of a token."""

    num_layers: int
    attention_width: int  # number of query heads × head size
    num_params: int
    num_embeddings: int = 0  # vocabulary size of the embeddings; 0: unknown

    @property
    def linear(self) -> float:
        """FLOPs per token of the forward pass without attention: one multiplication and one addition per parameter."""
        return 2.0 * self.num_params

    @property
    def quadratic(self) -> float:
        """FLOPs of attention per squared document length: scores and value sums, half of them masked."""
        return 2.0 * 2 / 2 * self.attention_width * self.num_layers


def row_cost(doc_lens: np.ndarray | Sequence[int], shape: ModelShape) -> float:
    """FLOPs of a row's forward pass; pass `attended_lens` (row.py), since a row with full attention is one document."""
    lens = np.asarray(doc_lens, dtype=np.float64)
    return float(shape.quadratic * (lens**2).sum() + shape.linear * lens.sum())


def arrange(costs: np.ndarray | Sequence[float], num_ranks: int) -> np.ndarray:
    """int64[num_ranks, rows per rank]: entry (r, k) is the k-th micro-batch of rank r."""
    costs = np.asarray(costs, dtype=np.float64)
    assert len(costs) % num_ranks == 0, f"{len(costs)} rows do not divide among {num_ranks} ranks"
    as_given = np.arange(len(costs)).reshape(num_ranks, -1)
    if num_ranks == 1 or not len(costs):
        return as_given[:, np.argsort(-costs, kind="stable")]
    columns = np.argsort(-costs, kind="stable").reshape(-1, num_ranks)
    arranged = _swap(costs, _difference(costs, columns))
    if costs[arranged].sum(axis=1).max() <= costs[as_given].sum(axis=1).max():
        return arranged
    # The given order is already more even. Sorting each rank's rows keeps that and aligns the micro-batches.
    return np.take_along_axis(as_given, np.argsort(-costs[as_given], axis=1, kind="stable"), axis=1)


def imbalance(costs: np.ndarray, arranged: np.ndarray) -> tuple[float, float]:
    """Return time relative to equal work, if ranks wait once per step, and if they wait in every micro-batch."""
    work = costs[arranged]
    equal = work.sum() / len(work)
    return float(work.sum(axis=1).max() / equal), float(work.max(axis=0).sum() / equal)


def _difference(costs: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Merge columns, largest differences first, heavy sums with light ones, until one column remains."""
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
    # Merging changed the order of the columns; a row's column follows from its place in the sorted order.
    places = np.empty(columns.size, dtype=np.int64)
    places[columns.ravel()] = np.arange(columns.size) // columns.shape[1]
    return np.take_along_axis(rows, np.argsort(places[rows], axis=1), axis=1)


def _minus_spread(sums: np.ndarray) -> float:
    return float(sums.min() - sums.max())


def _swap(costs: np.ndarray, arranged: np.ndarray) -> np.ndarray:
    """Swap rows of one column between the heaviest rank and others, while both gain."""
    arranged = arranged.copy()
    for _ in range(arranged.size):
        work = costs[arranged]
        sums = work.sum(axis=1)
        heaviest = int(np.argmax(sums))
        # Work that each swap takes from the heaviest rank; half of the difference between the two ranks is best.
        given = work[heaviest] - work
        gap = (sums[heaviest] - sums)[:, None]
        worst_after = np.where(given > 0, np.maximum(gap - given, given), np.inf)
        gain = gap - worst_after
        rank, column = divmod(int(np.argmax(gain)), gain.shape[1])
        if gain[rank, column] <= 1e-9 * sums[heaviest]:
            break
        arranged[[heaviest, rank], column] = arranged[[rank, heaviest], column]
    return arranged
