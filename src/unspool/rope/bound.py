"""How far a set of RoPE frequencies can tell similar keys from others, after Men et al. (arXiv 2405.14591).

B(m) = Σ cos(m·θ_i), over the d/2 frequencies, is proportional to what a similar key scores above a random one at
distance m, for queries and keys of independent entries. Where it is negative, similarity counts against a key.
Promise: every distance is evaluated, in float64. B(m) ≥ 0 up to a length is not monotone in the base: larger bases
may fail where smaller ones pass, so bases are tried in ascending order, never by bisection.
Price: the bound is that of the bases tried. Passing ones can stand alone between failing ones, so a finer grid may
find a smaller base (128K, d = 128: 8.8e6 among bases of two digits, 4.87e6 among those of three); published bounds
differ for this reason. The authors call theirs not strict: take it as order of magnitude.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

# Distances are first looked at in a short stretch, where most bases that fail do so.
FIRST_STRETCH = 4096
BLOCK = 64
NUM_PARTS = 16


def curve(inv_freq: np.ndarray, length: int, start: int = 0) -> np.ndarray:
    """B(m) for m = start … start + length − 1."""
    width = 1 << max(0, (length - 1).bit_length() + 1) // 2
    # cos((a + c)θ) = cos aθ·cos cθ − sin aθ·sin cθ: one matrix product instead of length × d/2 cosines.
    far = (start + width * np.arange(-(-length // width), dtype=np.float64))[:, None] * inv_freq
    near = np.arange(width, dtype=np.float64)[:, None] * inv_freq
    product = np.hstack((np.cos(far), -np.sin(far))) @ np.hstack((np.cos(near), np.sin(near))).T
    values: np.ndarray = product.ravel()[:length]
    return values


def plain_frequencies(base: float, dim: int) -> np.ndarray:
    """In float64: the bound is about the base, not about what rounding does to it."""
    return np.asarray(float(base) ** -(np.arange(0, dim, 2) / dim))


def first_negative(inv_freq: np.ndarray, limit: int) -> int | None:
    """The smallest distance below `limit` with B < 0."""
    for start, stop in _stretches(limit):
        below = np.flatnonzero(curve(inv_freq, stop - start, start) < 0)
        if len(below):
            return start + int(below[0])
    return None


def smallest_base(
    length: int, dim: int, bases: Iterable[float], *, advance: Callable[[int], None] = lambda done: None
) -> float | None:
    """The first of `bases`, which must ascend, with B(m) ≥ 0 for all m < length."""
    exponents = np.arange(0, dim, 2) / dim
    # Where a base failed, its neighbours mostly fail too; looking there first spares nearly all full scans.
    witnesses: list[int] = []
    for block in _blocks(bases):
        inv_freq = block[:, None] ** -exponents
        left = _passing(inv_freq, np.arange(len(block)), witnesses)
        while len(left):
            found = _negative_places(inv_freq[left[0]], length)
            if not found:
                return float(block[left[0]])
            witnesses += found
            left = _passing(inv_freq, left[1:], found)
        advance(len(block))
    return None


def _passing(inv_freq: np.ndarray, left: np.ndarray, distances: list[int]) -> np.ndarray:
    """Those of `left` with B ≥ 0 at all distances; the last are looked at first."""
    for distance in reversed(distances):
        if not len(left):
            break
        left = left[np.cos(distance * inv_freq[left]).sum(axis=1) >= 0]
    return left


def _negative_places(inv_freq: np.ndarray, length: int) -> list[int]:
    """Where B is lowest in each part of the length in which it is negative, the deepest last."""
    values = curve(inv_freq, length)
    parts = np.array_split(np.arange(length), min(length, NUM_PARTS))
    lowest = [int(part[values[part].argmin()]) for part in parts]
    return sorted((place for place in lowest if values[place] < 0), key=lambda place: -values[place])


def bound(length: int, dim: int, *, advance: Callable[[int], None] = lambda done: None) -> float | None:
    """The smallest base of two digits that passes; None where none up to 1e16 does."""
    return smallest_base(length, dim, round_bases(length), advance=advance)


def round_bases(at_least: float) -> Iterator[float]:
    """1.0e3, 1.1e3, …, 9.9e3, 1.0e4, …: what people write, and as fine as bounds are published."""
    for exponent in range(16):
        for digits in range(10, 100):
            base = digits * 10.0 ** (exponent - 1)
            # Not even infinitely many dimensions could do with a base below length / 0.6165 (Su).
            if base > max(1.0, at_least):
                yield base


def bound_by_refinement(length: int, dim: int, rounds: int = 5) -> float | None:
    """Su's procedure, behind his published bounds: from 1000·length, ever finer equal divisions down from the last."""
    base: float | None = 1000.0 * length
    for number in range(1, rounds + 1):
        if base is None:
            return None
        base = smallest_base(length, dim, np.linspace(0, 1, 10**number + 1)[1:] * base)
    return base


def _stretches(limit: int) -> Iterator[tuple[int, int]]:
    start, stop = 0, FIRST_STRETCH
    while start < limit:
        yield start, min(stop, limit)
        start, stop = stop, min(2 * stop, stop + (1 << 20))


def _blocks(bases: Iterable[float]) -> Iterator[np.ndarray]:
    if isinstance(bases, np.ndarray):
        yield from (bases[start : start + BLOCK] for start in range(0, len(bases), BLOCK))
        return
    block: list[float] = []
    for base in bases:
        block.append(base)
        if len(block) == BLOCK:
            yield np.array(block)
            block = []
    if block:
        yield np.array(block)
