"""Which row is trained when: a pure function of the seed and the slot.

In: the shares of a stage's rows sets, their sizes and lengths. Out: for slot k, the rows that fill it.
A slot is `context` tokens, filled by the rows of one set; step s of n slots takes slots s·n to (s+1)·n − 1,
whichever rank computes them.
Promise: any slot is found without walking through the earlier ones; after any number of slots each
set has had its share of them to within one slot; a set is used up before a row of it returns.
Price: shares that do not repeat within PERIOD slots are rounded to 1 / PERIOD, and none below that can be had.
Elsewhere: reading the rows (store.py).

Rows may be shorter than the context, which makes length curricula: at a context of 512K, `{repos-512k: 0.5,
repos-64k: 0.5}` trains on 512K tokens of one repository in half of the slots and on eight documents of 64K in the
others, each of which sees only itself.
"""

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

import numpy as np

from unspool.base.errors import ConfigError
from unspool.base.rng import rng_for
from unspool.base.sizes import format_size

# Slots after which the pattern of sets repeats at the latest.
PERIOD = 10_000
# Up to here repeating text costs next to nothing; beyond, less and less is learnt (Muennighoff et al. 2023).
MOST_EPOCHS = 4.0


class Mix:
    """The schedule of one stage. `weights`, `sizes` (rows) and `row_lens` are by rows set.

    Stages of one seed draw a set's rows in the same order unless they tell their names by `stage`.
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
                    f"context of {format_size(context)}; a context must be filled by whole rows."
                )
            if not sizes[name]:
                raise ConfigError(f"rows {name} hold no row; leave them out of the mix or give them more text.")
        self._sizes = sizes
        self._seed = seed
        # Without a name the key is what it was before stages had one, and so is the order.
        self._purpose = ("mix", stage) if stage else ("mix",)
        self._rows_per_slot = {name: context // row_lens[name] for name in self._names}
        self._quotas = _quotas([weights[name] for name in self._names])
        self._period = sum(self._quotas)
        self._pattern, self._earlier = _pattern(self._quotas)
        self._orders: dict[tuple[str, int], np.ndarray] = {}

    def slot(self, index: int) -> list[tuple[str, int]]:
        """The rows of slot `index`: (rows set, row index)."""
        period, inner = divmod(index, self._period)
        number = int(self._pattern[inner])
        name = self._names[number]
        use = (period * self._quotas[number] + int(self._earlier[inner])) * self._rows_per_slot[name]
        return [(name, self._row(name, use + offset)) for offset in range(self._rows_per_slot[name])]

    def epochs(self, num_slots: int) -> dict[str, float]:
        """How often each set is used up in the first `num_slots` slots."""
        periods, inner = divmod(num_slots, self._period)
        counts = np.bincount(self._pattern[:inner], minlength=len(self._names))
        return {
            name: (periods * quota + int(count)) * self._rows_per_slot[name] / self._sizes[name]
            for name, quota, count in zip(self._names, self._quotas, counts, strict=True)
        }

    def _row(self, name: str, use: int) -> int:
        epoch, place = divmod(use, self._sizes[name])
        if (name, epoch) not in self._orders:
            # Two epochs of a set can meet in one batch; older ones are not needed again.
            for key in [key for key in self._orders if key[0] == name and abs(key[1] - epoch) > 1]:
                del self._orders[key]
            self._orders[name, epoch] = rng_for(self._seed, *self._purpose, name, epoch).permutation(self._sizes[name])
        return int(self._orders[name, epoch][place])


def epoch_warnings(epochs: Mapping[str, float], most: float = MOST_EPOCHS) -> list[str]:
    """A sentence for each set that is repeated more than `most` times; give it `Mix.epochs` of a stage."""
    return [
        f"rows {name} are repeated {count:.3g} times; beyond {most:g} times little is learnt from them: "
        f"give them more text or a smaller share."
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
        # The set that is furthest on the wrong side; one that has only a single slot keeps it.
        error = np.where((quotas > 1) | (change > 0), change * (exact - quotas), -np.inf)
        quotas[int(np.argmax(error))] += change
    return [int(quota) for quota in quotas]


def _pattern(quotas: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each slot of a period its set, and how many slots of that set come earlier.

    The j-th slot of a set is due between j · period / quota and (j + 1) · period / quota. Serving, of those
    that are due, the one whose time runs out first never misses one (their rates sum to 1), so
    every set stays within one slot of its share after any number of slots. Simply serving the
    largest deficit would not: with many sets it can lag by more.
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
