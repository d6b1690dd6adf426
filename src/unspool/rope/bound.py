"""The distance up to which RoPE frequencies distinguish similar keys from random ones (Men et al., arXiv 2405.14591).

B(m) = Σ cos(m·θ_i), over the d/2 frequencies, is proportional to the score margin of a similar key over a random key at
distance m, for queries and keys with independent entries. If it is negative, similarity lowers the score.

Every distance is evaluated in float64. Whether B(m) ≥ 0 up to a length is not monotone in the base: a larger base may
fail where a smaller one passes. So bases are tried in ascending order, not by bisection. The bound depends on the grid
of bases, so published bounds differ: a finer grid may find a smaller base. At 128K and d = 128 it is 8.8e6 among bases
of two digits, and 4.87e6 among those of three. The authors call their bound not strict: use it as an order of
magnitude.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np

from unspool.rope.tables import plain_frequencies

# Most failing bases fail within the first distances.
FIRST_RANGE = 4096
BASES_PER_BLOCK = 64
NUM_PARTS = 16


def curve(inv_freq: np.ndarray, length: int, start: int = 0) -> np.ndarray:
    """Return B(m) for m = start … start + length − 1."""
    width = 1 << max(0, (length - 1).bit_length() + 1) // 2
    # cos((a + c)θ) = cos aθ·cos cθ − sin aθ·sin cθ: one matrix product instead of length × d/2 cosines.
    far = (start + width * np.arange(-(-length // width), dtype=np.float64))[:, None] * inv_freq
    near = np.arange(width, dtype=np.float64)[:, None] * inv_freq
    product = np.hstack((np.cos(far), -np.sin(far))) @ np.hstack((np.cos(near), np.sin(near))).T
    values: np.ndarray = product.ravel()[:length]
    return values


def first_negative(inv_freq: np.ndarray, limit: int) -> int | None:
    """Return the smallest distance below `limit` with B < 0."""
    for start, stop in _doubling_ranges(limit):
        below = np.flatnonzero(curve(inv_freq, stop - start, start) < 0)
        if len(below):
            return start + int(below[0])
    return None


def smallest_base(
    length: int, dim: int, bases: Iterable[float], *, advance: Callable[[int], None] = lambda done: None
) -> float | None:
    """Return the first of `bases`, which must ascend, with B(m) ≥ 0 for all m < length."""
    # A base mostly fails at the same distances as its neighbors; checking these first avoids nearly all full scans.
    witnesses: list[int] = []
    remaining = iter(bases)
    while some := list(islice(remaining, BASES_PER_BLOCK)):
        block = np.array(some)
        inv_freq = plain_frequencies(block[:, None], dim)
        left = _passing(inv_freq, np.arange(len(block)), witnesses)
        while len(left):
            found = _negative_distances(inv_freq[left[0]], length)
            if not found:
                return float(block[left[0]])
            witnesses += found
            left = _passing(inv_freq, left[1:], found)
        advance(len(block))
    return None


def _passing(inv_freq: np.ndarray, left: np.ndarray, distances: list[int]) -> np.ndarray:
    """Return the bases in `left` with B ≥ 0 at all distances; the last distances are checked first."""
    for distance in reversed(distances):
        if not len(left):
            break
        left = left[np.cos(distance * inv_freq[left]).sum(axis=1) >= 0]
    return left


def _negative_distances(inv_freq: np.ndarray, length: int) -> list[int]:
    """Return the distance of the lowest B in each part of the length where B is negative, the lowest last."""
    values = curve(inv_freq, length)
    parts = np.array_split(np.arange(length), min(length, NUM_PARTS))
    lowest = [int(part[values[part].argmin()]) for part in parts]
    return sorted((at for at in lowest if values[at] < 0), key=lambda at: -values[at])


def bound(length: int, dim: int, *, advance: Callable[[int], None] = lambda done: None) -> float | None:
    """Return the smallest base of two digits that passes; None if none up to 1e16 does."""
    return smallest_base(length, dim, round_bases(length), advance=advance)


def round_bases(at_least: float) -> Iterator[float]:
    """Yield 1.0e3, 1.1e3, …, 9.9e3, 1.0e4, …: bases of two digits, as precise as published bounds."""
    for exponent in range(16):
        for digits in range(10, 100):
            base = digits * 10.0 ** (exponent - 1)
            # No base below length / 0.6165 passes, with any number of dimensions (Su).
            if base > max(1.0, at_least):
                yield base


def _doubling_ranges(limit: int) -> Iterator[tuple[int, int]]:
    start, stop = 0, FIRST_RANGE
    while start < limit:
        yield start, min(stop, limit)
        start, stop = stop, min(2 * stop, stop + (1 << 20))
