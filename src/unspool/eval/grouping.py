"""Which questions of a set are asked, and which of them are read together.

In: strata, or contexts and lengths. Out: indices; groups of them.
Promise: pure functions; a subset takes equally many of every stratum; groups keep the order of their first question.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from unspool.base.rng import rng_for
from unspool.model.room import MOST_PROMPTS

# Questions on one context that are decoded side by side.
MOST_TOGETHER = 16
# Prompts without a context in common are answered together too, up to so many tokens in all: a row. Small, since a row
# is what is lost when a run is killed; a GPU reads longer rows in seconds and says so (`row_tokens` of a backend).
ROW_TOKENS = 8192
# And so many prompts, where rows are longer than that.
MOST_UNRELATED = MOST_PROMPTS
# A prompt longer than this share of a row stays alone.
_SHARE = 4


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


def whole_subset(strata: Sequence[Hashable], count: int, seed: int, *, together: int) -> list[int]:
    """The same where `together` indices in a row are one whole: as many wholes as `count` holds, at least one.

    The stratum of a whole is that of its first index.
    """
    wholes = subset(strata[::together], max(1, count // together), seed)
    return [at for whole in wholes for at in range(whole * together, min((whole + 1) * together, len(strata)))]


def groups(contexts: Sequence[str], tokens: Sequence[int], row_tokens: int = ROW_TOKENS) -> list[list[int]]:
    """Places of questions: those with equal contexts together, then short ones in rows, the others alone."""
    by_context: dict[str, list[int]] = {}
    for place, context in enumerate(contexts):
        by_context.setdefault(context, []).append(place)
    found: list[list[int]] = []
    row: list[int] = []
    most = MOST_TOGETHER if row_tokens <= ROW_TOKENS else MOST_UNRELATED
    for places in by_context.values():
        if len(places) > 1:
            found += [places[at : at + MOST_TOGETHER] for at in range(0, len(places), MOST_TOGETHER)]
        elif tokens[places[0]] > row_tokens // _SHARE:
            found.append(places)
        else:
            if len(row) >= most or sum(tokens[at] for at in [*row, *places]) > row_tokens:
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
