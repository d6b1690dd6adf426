"""Which cheap measure ranks arms as an expensive one does: rank correlation over arms with bootstrap intervals."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
FEWEST = 5  # arms; with fewer, a bootstrap over arms has no meaning


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Spearman's rank correlation of a measure with the target. 1: the same order of arms; −1: the opposite order."""

    measure: str
    value: float | None  # None: fewer than three arms, or all equal
    low: float | None
    high: float | None
    arms: int  # arms with both measures


def rank_agreement(values: Mapping[str, Mapping[str, float]], target: str) -> list[Agreement]:
    """Compare each measure with the target, best first.

    `values` has, by measure, one value per arm, where higher is better. Intervals are 95% percentile intervals over
    arms, with a fixed seed.
    """
    found = []
    for name, by_arm in values.items():
        if name == target:
            continue
        arms = sorted(by_arm.keys() & values[target].keys())
        pair = np.array([[by_arm[arm] for arm in arms], [values[target][arm] for arm in arms]])
        value = spearman(pair) if len(arms) > 2 else None
        low, high = _bootstrap(pair) if len(arms) >= FEWEST else (None, None)
        found.append(Agreement(measure=name, value=value, low=low, high=high, arms=len(arms)))
    return sorted(found, key=lambda one: -2.0 if one.value is None else one.value, reverse=True)


def spearman(pair: np.ndarray) -> float | None:
    """Return the correlation of the ranks of two rows of numbers; None if a row is constant."""
    (value,) = _spearman(pair[None])
    return None if np.isnan(value) else float(value)


def _spearman(pairs: np.ndarray) -> np.ndarray:
    """float[N] from float[N, 2, arms]; equal values share their mean rank."""
    from scipy.stats import rankdata  # import late: scipy takes a second

    ranks = rankdata(pairs, axis=-1)
    ranks -= ranks.mean(axis=-1, keepdims=True)
    norms = np.sqrt((ranks**2).sum(axis=-1)).prod(axis=-1)
    with np.errstate(invalid="ignore"):
        found: np.ndarray = ranks.prod(axis=1).sum(axis=-1) / norms
    return found


def _bootstrap(pair: np.ndarray) -> tuple[float | None, float | None]:
    n = pair.shape[1]
    drawn = np.random.default_rng(n).integers(n, size=(DRAWS, n))
    found = _spearman(pair[:, drawn].transpose(1, 0, 2))
    known = found[~np.isnan(found)]  # a draw in which all arms are equal has no correlation
    if not len(known):
        return None, None
    low, high = np.quantile(known, [0.025, 0.975])
    return float(low), float(high)
