"""95% intervals of scores."""

import math
from collections.abc import Sequence

import numpy as np

Z = 1.96  # of a 95% interval


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson score interval, which stays within 0 and 1 and has a width even at 0 or n successes."""
    share = successes / n
    center = share + Z**2 / (2 * n)
    spread = Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    # At 0 and 1, rounding may put the share outside of the interval by a last digit.
    return max(0.0, min(share, (center - spread) / scale)), min(1.0, max(share, (center + spread) / scale))


def bootstrap(scores: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """Middle 95% of the means of bootstrap samples, drawn with a fixed seed."""
    values = np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(len(values))
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = float(values.mean())
    return min(mean, float(low)), max(mean, float(high))


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson interval where every score is 0 or 1, else a bootstrap; from 0 to 1 for a single graded score."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(scores), len(scores))
    return bootstrap(scores) if len(scores) > 1 else (0.0, 1.0)
