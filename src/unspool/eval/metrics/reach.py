"""What scores at several lengths say: how much is kept at the target, and how far it holds.

In: scores of single samples by length. Out: a ratio with its interval, a length.
Promise: what cannot be known is None, never zero: no samples, a reference score of 0, a threshold never met.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from unspool.base.rng import rng_for

# RULER's: what Llama-2-7B scores at 4K.
EFFECTIVE = 0.856
RESAMPLES, BLOCK = 2000, 100


@dataclass(frozen=True, kw_only=True)
class Ratio:
    value: float | None
    low: float | None
    high: float | None
    n_target: int
    n_reference: int


def adaptation_rate(target: Sequence[float | None], reference: Sequence[float | None], *, seed: int = 0) -> Ratio:
    """Mean score at the target length ÷ mean score at the reference length; 95% interval by bootstrap.

    Samples of the two lengths are drawn independently: they are different prompts.
    """
    ours, theirs = _known(target), _known(reference)
    counts = {"n_target": len(ours), "n_reference": len(theirs)}
    if not len(ours) or not len(theirs) or not theirs.mean():
        return Ratio(value=None, low=None, high=None, **counts)
    rng = rng_for(seed, "adaptation rate", len(ours), len(theirs))
    above, below = _resampled_means(ours, rng), _resampled_means(theirs, rng)
    # A resample without a right answer at the reference length has no ratio; those that have one make the interval.
    ratios = above[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(value=float(ours.mean() / theirs.mean()), low=float(low), high=float(high), **counts)


def _known(scores: Sequence[float | None]) -> np.ndarray:
    return np.array([score for score in scores if score is not None], dtype=np.float64)


def _resampled_means(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # Some at a time: all at once would be gigabytes for the samples of a whole suite.
    blocks = [rng.choice(scores, size=(BLOCK, len(scores))).mean(axis=1) for _ in range(RESAMPLES // BLOCK)]
    return np.concatenate(blocks)


def effective_length(
    scores: Mapping[int, Sequence[float | None]], *, threshold: float = EFFECTIVE, shares: float = 1.0
) -> int | None:
    """The largest length up to which the mean of every measured length reaches the threshold.

    None if the shortest measured length does not reach it, or if nothing was scored. Lengths without a scored
    sample are passed over: they say nothing. `shares` is what a perfect answer scores: 100 for percentages.
    """
    longest = None
    for length in sorted(scores):
        known = [score for score in scores[length] if score is not None]
        if not known:
            continue
        if fmean(known) / shares < threshold:
            break
        longest = length
    return longest
