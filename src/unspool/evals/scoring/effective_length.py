"""How scores change with length: adaptation rate and effective length; what cannot be known is None, not zero."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from unspool.core.rng import rng_for

# RULER's threshold: the score of Llama-2-7B at 4K.
EFFECTIVE = 0.856
# The target and reference lengths of Untie the Knots (Tables 1 and 2).
RATE_LENGTHS = (128 << 10, 32 << 10)
RESAMPLES, BLOCK = 2000, 100
Scores = Sequence[float | None] | Mapping[str, Sequence[float | None]]  # of one task, or by task


@dataclass(frozen=True, kw_only=True)
class Ratio:
    value: float | None
    low: float | None
    high: float | None
    n_target: int
    n_reference: int


def rate_lengths(lengths: Collection[int], target: int | None = None, reference: int | None = None) -> tuple[int, int]:
    """Return the target and the reference length of the adaptation rate, of those that were scored.

    By default 128K over 32K where both were scored, as in Untie the Knots, else the longest over the shortest.
    """
    default = RATE_LENGTHS if set(RATE_LENGTHS) <= set(lengths) else (max(lengths), min(lengths))
    return target or default[0], reference or default[1]


def adaptation_rate(target: Scores, reference: Scores, *, seed: int = 0) -> Ratio:
    """Divide the mean score at the target length by that at the reference length; 95% interval by bootstrap.

    Scores by task give every task the same weight, and only tasks with scores at both lengths count. Samples of the two
    lengths are drawn independently, since they are different prompts. There is no interval if one of several tasks
    has a single sample, which has no variance.
    """
    both = [_by_task(scores) for scores in (target, reference)]
    names = [name for name in both[0] if len(both[0][name]) and len(both[1].get(name, ()))]
    ours, theirs = ([scores[name] for name in names] for scores in both)
    counts = {"n_target": sum(map(len, ours)), "n_reference": sum(map(len, theirs))}
    if not names or not any(scores.any() for scores in theirs):
        return Ratio(value=None, low=None, high=None, **counts)
    value = fmean(float(scores.mean()) for scores in ours) / fmean(float(scores.mean()) for scores in theirs)
    if len(names) > 1 and min(map(len, [*ours, *theirs])) < 2:
        return Ratio(value=value, low=None, high=None, **counts)
    rng = rng_for(seed, "adaptation rate", counts["n_target"], counts["n_reference"])
    # A resample of few samples varies too little; drawing one sample less per task corrects for it.
    less = 1 if len(names) > 1 else 0
    above, below = (np.mean([_resampled_means(task, rng, less) for task in side], axis=0) for side in (ours, theirs))
    # Resamples with a reference mean of 0 have no ratio and are dropped.
    ratios = above[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(value=value, low=float(low), high=float(high), **counts)


def _by_task(scores: Scores) -> dict[str, np.ndarray]:
    by_task = scores if isinstance(scores, Mapping) else {"": scores}
    return {name: _known(values) for name, values in by_task.items()}


def _known(scores: Sequence[float | None]) -> np.ndarray:
    return np.array([score for score in scores if score is not None], dtype=np.float64)


def _resampled_means(scores: np.ndarray, rng: np.random.Generator, less: int = 0) -> np.ndarray:
    # In blocks: all at once would take gigabytes for the samples of a whole suite.
    blocks = [rng.choice(scores, size=(BLOCK, len(scores) - less)).mean(axis=1) for _ in range(RESAMPLES // BLOCK)]
    return np.concatenate(blocks)


def effective_length(scores: Mapping[int, Sequence[float | None]], *, threshold: float = EFFECTIVE) -> int | None:
    """Return the largest length up to which the mean of every measured length reaches the threshold.

    None if the shortest length does not reach it, or if nothing was scored. Lengths without scores are skipped.
    """
    longest = None
    for length in sorted(scores):
        known = [score for score in scores[length] if score is not None]
        if not known:
            continue
        if fmean(known) < threshold:
            break
        longest = length
    return longest
