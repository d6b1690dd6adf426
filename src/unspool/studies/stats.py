"""Are two arms really different? Pure functions from paired differences to p-values and intervals.

In: for every seed, how much each prompt contributes to the difference of two arms; the contributions of a seed sum to
its difference. Out: `Test`s. Two questions, which are not the same:

- `over_prompts`: would these very models differ on other prompts? Signs of whole prompts are flipped, in every way
  where that can be done, so the p-value is exact; where all differences are equal in size this is the sign test. A
  prompt that several seeds answered is one prompt, and so is a context that several questions share.
- `over_seeds`: would the recipes differ under other seeds? Seeds are the units, by Student's t. One seed cannot tell,
  and two or three hardly. The spread over prompts is a floor, or two seeds that agree by chance would prove anything.

Promise: under no difference p is below 0.05 in at most about 5% of studies (tests/recipes/test_study_stats.py).
Price: the exact p-value of n prompts is never below 2^(1−n).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import numpy as np

from unspool.core.stats import (
    ALPHA,
    agresti_min,
    agresti_min_interval,
    sign_test,
    standard_error,
    t_p_value,
    t_quantile,
)

Contributions = Mapping[int, Mapping[str, float]]
"""Seed: prompt: its part of that seed's difference."""

# Differences up to which all 2^n flips are gone through; above, so many are drawn.
MOST_EXACT = 14
DRAWS = 20_000
# Of differences that are equal but for rounding.
TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Test:
    """`n` units; the interval is of 95%, None where one unit says nothing about others."""

    n: int
    p: float | None
    low: float | None
    high: float | None


def pooled(contributions: Contributions) -> dict[str, float]:
    """The mean over seeds, prompt by prompt; a prompt of several seeds is one."""
    whole: dict[str, float] = {}
    for prompts in contributions.values():
        for prompt, value in prompts.items():
            whole[prompt] = whole.get(prompt, 0.0) + value / len(contributions)
    return whole


def difference(contributions: Contributions) -> float | None:
    """The mean over seeds."""
    return fmean(sum(prompts.values()) for prompts in contributions.values()) if contributions else None


def over_prompts(contributions: Contributions, *, bounded: bool) -> Test:
    """`bounded`: single differences lie between −1 and 1, as those of scores do."""
    values = np.array(list(pooled(contributions).values()))
    n = len(values)
    if n == 0:
        return Test(n=0, p=None, low=None, high=None)
    # As single differences, whose mean is the difference.
    low, high = _interval(values * n, bounded=bounded)
    return Test(n=n, p=flip_p(values), low=low, high=high)


def flip_p(values: np.ndarray) -> float:
    """The share of sign flips that give a sum at least as far from 0."""
    sizes = np.abs(values[np.abs(values) > TOLERANCE * max(1e-300, float(np.abs(values).max(initial=0)))])
    signed = float(values.sum())
    n = len(sizes)
    if n == 0:
        return 1.0
    if np.ptp(sizes) <= TOLERANCE * sizes.max():
        return sign_test(round(signed / float(sizes.mean())), n)
    wanted = abs(signed) - TOLERANCE * float(sizes.sum())
    if n <= MOST_EXACT:
        return float(np.mean(np.abs(_flips(n) @ sizes) >= wanted))
    rng = np.random.default_rng(n)
    beyond = 0
    for _ in range(10):
        signs = rng.integers(2, size=(DRAWS // 10, n)) * 2 - 1
        beyond += int((np.abs(signs @ sizes) >= wanted).sum())
    # What was observed is one of the flips.
    return (beyond + 1) / (DRAWS + 1)


@cache
def _flips(n: int) -> np.ndarray:
    return 1 - 2 * ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1).astype(np.int8)


def could_tell(num_prompts: int, comparisons: int) -> bool:
    """Whether so many prompts could show a difference at all, if every one of them spoke for it."""
    return 2.0 ** (1 - num_prompts) * max(1, comparisons) < ALPHA


def _interval(values: np.ndarray, *, bounded: bool) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    quantile = t_quantile(len(values) - 1)
    if bounded:
        return agresti_min_interval(values, quantile)
    mean, error = standard_error(values)
    return mean - quantile * error, mean + quantile * error


def over_seeds(contributions: Contributions, *, bounded: bool = False) -> Test:
    """Whether seeds agree by more than chance; nothing from one of them."""
    means = [sum(prompts.values()) for prompts in contributions.values()]
    k = len(means)
    if k < 2:
        return Test(n=k, p=None, low=None, high=None)
    prompts = np.array(list(pooled(contributions).values()))
    _, noise = (agresti_min if bounded else standard_error)(prompts * len(prompts))
    error = max(stdev(means) / math.sqrt(k), noise)
    mean = fmean(means)
    if error <= TOLERANCE * abs(mean):
        # Without any spread there is nothing to judge by.
        return Test(n=k, p=None, low=None, high=None)
    half = t_quantile(k - 1) * error
    return Test(n=k, p=t_p_value(mean / error, k - 1), low=mean - half, high=mean + half)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: the smallest of m is multiplied by m, the next by m − 1, …; None stays None."""
    known = sorted((p, at) for at, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    so_far = 0.0
    for rank, (p, at) in enumerate(known):
        so_far = max(so_far, min(1.0, (len(known) - rank) * p))
        corrected[at] = so_far
    return corrected
