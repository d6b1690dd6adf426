"""Which rows or documents are shown."""

from collections.abc import Sequence

import numpy as np

from unspool.base.errors import ConfigError
from unspool.base.rng import rng_for


def choose(candidates: Sequence[int], count: int, seed: int) -> list[int]:
    """The first candidate and `count - 1` others drawn by the seed, in order."""
    if not candidates:
        return []
    others = min(count, len(candidates)) - 1
    drawn = (
        rng_for(seed, "look").choice(len(candidates) - 1, size=others, replace=False) if others else np.zeros(0, int)
    )
    return [candidates[place] for place in [0, *sorted((drawn + 1).tolist())]]


def check_index(index: int, total: int, name: str) -> int:
    if 0 <= index < total:
        return index
    there = f"there are {total:,} {name}s, 0 to {total - 1}" if total > 1 else f"there is one {name}, number 0"
    raise ConfigError(f"--index {index}: {there if total else f'there is no {name}'}.")
