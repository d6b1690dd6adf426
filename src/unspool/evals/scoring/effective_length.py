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


# NoLiMa's: a length is effective while the model keeps this share of its score at short length.
KEPT = 0.85
DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class LengthEstimate:
    value: int
    low: int
    high: int


def relative_effective_length(scores: Mapping[int, Mapping[str, Sequence[float]]], *, seed: int = 0) -> LengthEstimate:
    """Return the longest length at which a model keeps `KEPT` of its score at the shortest, with a 95% interval.

    Scores are from 0 to 1, by length and task, at least one each; every task counts the same. Means are first made
    non-increasing in length (isotonic regression, weighted by n), so that chance at one length does not end the search.
    The interval comes from draws of every task's mean from its Beta posterior (Jeffreys prior), which has a width even
    where all answers were right.
    """
    lengths = sorted(scores)
    counts = np.array([sum(map(len, scores[length].values())) for length in lengths], dtype=np.float64)
    means = np.array([fmean(fmean(task) for task in scores[length].values()) for length in lengths])
    rng = rng_for(seed, "effective length", len(lengths), int(counts.sum()))
    drawn = np.stack([_drawn_means(scores[length], rng) for length in lengths], axis=1)
    value = _num_effective(means, counts)
    low, high = np.quantile([_num_effective(row, counts) for row in drawn], [0.025, 0.975], method="nearest")
    return LengthEstimate(
        value=lengths[value - 1], low=lengths[min(value, int(low)) - 1], high=lengths[max(value, int(high)) - 1]
    )


def _drawn_means(tasks: Mapping[str, Sequence[float]], rng: np.random.Generator) -> np.ndarray:
    right = [(float(sum(task)), len(task)) for task in tasks.values()]
    drawn: np.ndarray = np.mean([rng.beta(total + 0.5, n - total + 0.5, size=DRAWS) for total, n in right], axis=0)
    return drawn


def _num_effective(means: np.ndarray, weights: np.ndarray) -> int:
    """Count the lengths, from the shortest on, that keep enough of the shortest's score; at least one."""
    from scipy.optimize import isotonic_regression  # import late: scipy takes a second

    smooth = isotonic_regression(means, weights=weights, increasing=False).x
    # Rounding must not drop a length that keeps exactly this share.
    return int(np.count_nonzero(smooth >= KEPT * smooth[0] - 1e-9))
