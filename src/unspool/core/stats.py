"""Intervals and tests that several packages use. Distributions come from `scipy.stats`."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

ALPHA = 0.05
Z = 1.96  # normal quantile of a two-sided 95% interval


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval, which has a width even at 0 or n successes."""
    return _wilson(successes / n, n)


def _wilson(share: float, n: float) -> tuple[float, float]:
    center = share + Z**2 / (2 * n)
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    # Rounding may push the bounds past the share by a last digit at 0 and 1.
    return max(0.0, min(share, (center - spread) / scale)), min(1.0, max(share, (center + spread) / scale))


def stratified_wilson(strata: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return a 95% interval of the mean of 0/1 scores drawn from fixed strata, such as the depths of needles.

    Differences between strata are not sampling error, so the interval is Wilson's for the number of scores from one
    population that would give the same variance. Shares inside strata are smoothed by one success and one failure;
    without this, strata of equal scores would count as certain.
    """
    scores = [score for stratum in strata for score in stratum]
    n = len(scores)
    within = 0.0
    for stratum in strata:
        share = (sum(stratum) + 1) / (len(stratum) + 2)
        within += len(stratum) * share * (1 - share) / n
    share = (sum(scores) + 1) / (n + 2)
    return _wilson(sum(scores) / n, n * max(1.0, share * (1 - share) / within))


def bootstrap(scores: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean, with a fixed seed."""
    values = np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(len(values))
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(values.mean())
    return min(mean, float(low)), max(mean, float(high))


def could_tell(n: int, comparisons: int = 1) -> bool:
    """Return whether n prompts can show a difference if all of them agree: by a sign test, for n of at least 6."""
    return 2.0 ** (1 - n) * max(1, comparisons) < ALPHA


def score_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's interval for scores of 0 and 1, else a bootstrap interval. Too few graded scores give 0 to 1."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(scores), len(scores))
    return bootstrap(scores) if could_tell(len(scores)) else (0.0, 1.0)


def standard_error(values: np.ndarray) -> tuple[float, float]:
    """Return mean and standard error; a single value has error 0."""
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), error


def clustered_error(values: np.ndarray, clusters: Sequence[object]) -> tuple[float, int]:
    """Return the standard error of the mean and its degrees of freedom, where values of one cluster may depend.

    The error comes from the sums of the clusters' deviations (Liang and Zeger), with G / (G − 1) for G clusters and
    G − 1 degrees of freedom. It needs at least two clusters.
    """
    _, group = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(group, weights=values - values.mean())
    count = len(sums)
    return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values), count - 1


def agresti_min(differences: np.ndarray) -> tuple[float, float]:
    """Return mean and standard error of paired differences in [-1, 1] by Agresti and Min.

    Half an observation is added to each of the four outcomes of a pair. Without this, a few pairs that all agree would
    count as certain.
    """
    n = len(differences)
    mean = float(differences.sum()) / (n + 2)
    variance = max(0.0, (float((differences**2).sum()) + 1) / (n + 2) - mean**2)
    return mean, math.sqrt(variance / (n + 2))


def agresti_min_interval(differences: np.ndarray, quantile: float = Z) -> tuple[float, float]:
    """Return the interval of `agresti_min`, widened where needed so that it contains the observed mean."""
    mean, error = agresti_min(differences)
    observed = float(differences.mean())
    half = quantile * error
    return max(-1.0, min(observed, mean - half)), min(1.0, max(observed, mean + half))


@cache
def t_quantile(degrees: float, level: float = 1 - ALPHA / 2) -> float:
    """Return a quantile of Student's t distribution; by default of a two-sided 95% interval."""
    from scipy.stats import t  # import late: scipy takes a second, and only comparisons need it

    return float(t.ppf(level, degrees))


def t_p_value(statistic: float, degrees: float) -> float:
    """Return the two-sided p-value of a t statistic."""
    from scipy.stats import t

    return float(2 * t.sf(abs(statistic), degrees))


def sign_test(lead: int, n: int) -> float:
    """Return the two-sided p-value of n coin flips with `lead` more heads than tails."""
    from scipy.stats import binomtest

    return float(binomtest((n + lead) // 2, n).pvalue)
