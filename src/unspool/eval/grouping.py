"""Which questions of a set are asked, and which of them are read together.

In: strata, or contexts and lengths. Out: indices; groups of them.
Promise: pure functions; a subset takes equally many of every stratum; groups keep the order of their first question.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from unspool.base.rng import rng_for

# Questions on one context that are decoded side by side.
MOST_TOGETHER = 16
# Short prompts are read in one row, up to so many tokens in all; longer ones gain nothing by company.
ROW_TOKENS = 8192
SHORT = ROW_TOKENS // 4


def subset(strata: Sequence[Hashable], count: int, seed: int) -> list[int]:
    """`count` indices, as equally from all strata as their sizes allow, in rising order."""
    if count >= len(strata):
        return list(range(len(strata)))
    order = rng_for(seed, "subset", len(strata)).permutation(len(strata)).tolist()
    seen: dict[Hashable, int] = {}
    rank = []
    for at in order:
        # The how-manieth of its stratum: all firsts come before any second.
        rank.append((seen.setdefault(strata[at], 0), at))
        seen[strata[at]] += 1
    rank.sort(key=lambda one: one[0])
    return sorted(at for _, at in rank[:count])


def groups(contexts: Sequence[str], tokens: Sequence[int]) -> list[list[int]]:
    """Places of questions: those with equal contexts together, then short ones in rows, the others alone."""
    by_context: dict[str, list[int]] = {}
    for place, context in enumerate(contexts):
        by_context.setdefault(context, []).append(place)
    found: list[list[int]] = []
    row: list[int] = []
    for places in by_context.values():
        if len(places) > 1:
            found += [places[at : at + MOST_TOGETHER] for at in range(0, len(places), MOST_TOGETHER)]
        elif tokens[places[0]] > SHORT:
            found.append(places)
        else:
            if len(row) >= MOST_TOGETHER or sum(tokens[at] for at in [*row, *places]) > ROW_TOKENS:
                found.append(row)
                row = []
            row = [*row, *places]
    found += [row] if row else []
    return sorted(found)


def common_prefix(rows: Sequence[np.ndarray]) -> int:
    """How many ids all rows begin with, leaving each at least one of its own."""
    shortest = min(map(len, rows)) - 1
    first = rows[0][:shortest]
    same = np.ones(shortest, dtype=bool)
    for row in rows[1:]:
        same &= row[:shortest] == first
    return int(np.argmin(same)) if not same.all() else shortest
