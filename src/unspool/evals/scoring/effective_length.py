"""Adaptation rate and effective length. Unknown values are None, not zero."""

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
Scores = Sequence[float | None] | Mapping[str, Sequence[float | None]]  # scores of one task, or scores by task


@dataclass(frozen=True, kw_only=True)
class Ratio:
    value: float | None
    low: float | None
    high: float | None
    n_target: int
    n_reference: int


def rate_lengths(lengths: Collection[int], target: int | None = None, reference: int | None = None) -> tuple[int, int]:
    """Return (target length, reference length) of the adaptation rate, from the scored lengths.

    Default: 128K and 32K if both were scored, as in Untie the Knots, else the longest and the shortest.
    """
    default = RATE_LENGTHS if set(RATE_LENGTHS) <= set(lengths) else (max(lengths), min(lengths))
    return target or default[0], reference or default[1]


def adaptation_rate(target: Scores, reference: Scores, *, seed: int = 0) -> Ratio:
    """Mean score at the target length ÷ mean score at the reference length, with a 95% bootstrap interval.

    With scores by task, every task has equal weight, and only tasks with scores at both lengths count. The samples of
    the two lengths are resampled independently, because their prompts differ. There is no interval if one of several
    tasks has a single sample, because one sample has no variance.
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
    # Resamples of few samples vary too little. Drawing one sample less per task corrects this.
    less = 1 if len(names) > 1 else 0
    above, below = (np.mean([_resampled_means(task, rng, less) for task in side], axis=0) for side in (ours, theirs))
    # Drop resamples with a reference mean of 0, which have no ratio.
    ratios = above[below > 0] / below[below > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(value=value, low=float(low), high=float(high), **counts)


def _by_task(scores: Scores) -> dict[str, np.ndarray]:
    by_task = scores if isinstance(scores, Mapping) else {"": scores}
    return {name: _known(values) for name, values in by_task.items()}


def _known(scores: Sequence[float | None]) -> np.ndarray:
    return np.array([score for score in scores if score is not None], dtype=np.float64)


def _resampled_means(scores: np.ndarray, rng: np.random.Generator, less: int = 0) -> np.ndarray:
    # In blocks, because all resamples of a whole suite would need gigabytes.
    blocks = [rng.choice(scores, size=(BLOCK, len(scores) - less)).mean(axis=1) for _ in range(RESAMPLES // BLOCK)]
    return np.concatenate(blocks)


def effective_length(scores: Mapping[int, Sequence[float | None]], *, threshold: float = EFFECTIVE) -> int | None:
    """Return the largest length up to which every measured mean reaches the threshold.

    Returns None if the shortest length does not reach it, or without scores. Skips lengths without scores.
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


# NoLiMa's threshold: a length is effective if the model keeps this share of its short-length score.
KEPT = 0.85
DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class LengthEstimate:
    value: int
    low: int
    high: int


def relative_effective_length(scores: Mapping[int, Mapping[str, Sequence[float]]], *, seed: int = 0) -> LengthEstimate:
    """Return the longest length at which a model keeps `KEPT` of its score at the shortest length, with a 95% interval.

    Scores are in [0, 1], by length and task, at least one each. All tasks have equal weight. Means are first made
    non-increasing in length (isotonic regression, weighted by n), so that chance at one length does not end the search.
    The interval comes from draws of every task's mean from its Beta posterior (Jeffreys prior), which has a width even
    if all answers were right.
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
    """Count the lengths, starting at the shortest, that keep enough of the shortest length's score; at least one."""
    from scipy.optimize import isotonic_regression  # import late: scipy needs a second to load

    smooth = isotonic_regression(means, weights=weights, increasing=False).x
    # Rounding must not exclude a length that keeps exactly this share.
    return int(np.count_nonzero(smooth >= KEPT * smooth[0] - 1e-9))
