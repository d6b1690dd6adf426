"""Rank the candidates of a trial by their loss beyond the old context, with paired differences to the best.

All candidates were measured on the same windows. The intervals hold for all differences together: Student's t with the
error level divided by the number of comparisons (Bonferroni). Windows of one document are alike, so the error is that
of clusters, and never smaller than that over windows. Fewer than MIN_DOCUMENTS cannot show how documents differ; then
the intervals cover other windows of the same documents only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from unspool.core.errors import DataError
from unspool.core.stats import ALPHA, clustered_error, standard_error, t_quantile

Losses = Mapping[str, Sequence[float]]
"""By window: the mean loss of each range of positions."""
MIN_DOCUMENTS = 4  # of two documents, an interval for eight comparisons would be 100 standard errors to each side
# The last range is at least this long, relative to the one before.
LEAST_LAST = 0.5


def range_edges(old_len: int, context_len: int) -> list[int]:
    """Return the edges of the position ranges: the old context, then ranges that double, up to the new context."""
    edges = [0, old_len]
    while context_len - 2 * edges[-1] >= LEAST_LAST * edges[-1]:
        edges.append(2 * edges[-1])
    return [*edges, context_len]


def range_means(losses: np.ndarray, edges: Sequence[int]) -> list[float]:
    """Return the mean loss of the tokens in each range, given the loss of tokens 1, 2, … of a window."""
    return [float(losses[max(0, start - 1) : stop - 1].mean()) for start, stop in pairwise(edges)]


def range_counts(edges: Sequence[int]) -> np.ndarray:
    """Return the number of predicted tokens in each range; the first token of a window is not predicted."""
    return np.array([stop - max(1, start) for start, stop in pairwise(edges)])


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A mean difference in nats per token, paired by window, with its interval."""

    mean: float
    low: float
    high: float

    @property
    def is_told_apart(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """The measured losses of one candidate."""

    label: str
    inside: float  # nats per token within the old context
    beyond: float  # beyond it
    ranges: tuple[float, ...]  # in each range of positions
    to_best: Difference | None  # loss beyond the old context minus that of the best candidate; None for the best
    inside_cost: Difference | None  # loss within the old context minus that of the reference; None without one
    losses: Mapping[str, tuple[float, ...]]


def rank(
    measured: Mapping[str, Losses],
    edges: Sequence[int],
    *,
    reference: str | None = None,
    documents: Mapping[str, str] | None = None,
) -> list[Ranked]:
    """Return the candidates from the lowest loss beyond the old context to the highest.

    `reference` is the candidate that losses within the old context are compared with. `documents` has the document of
    each window; by default each window has its own. Raises DataError if two candidates were measured on different
    windows.
    """
    tables = _tables(measured)
    windows = sorted(next(iter(measured.values())))
    clusters = windows if documents is None else [documents[window] for window in windows]
    counts = range_counts(edges)
    inside = {label: table[:, 0] for label, table in tables.items()}
    beyond = {label: table[:, 1:] @ counts[1:] / counts[1:].sum() for label, table in tables.items()}
    # The label settles ties, so that the order of the candidates does not matter.
    order = sorted(tables, key=lambda label: (float(beyond[label].mean()), label))
    best = order[0]
    return [
        Ranked(
            label=label,
            inside=float(inside[label].mean()),
            beyond=float(beyond[label].mean()),
            ranges=tuple(map(float, tables[label].mean(axis=0))),
            to_best=None if label == best else _difference(beyond[label] - beyond[best], clusters, len(order) - 1),
            inside_cost=None
            if reference not in tables or label == reference
            else _difference(inside[label] - inside[reference], clusters, len(order) - 1),
            losses={window: tuple(losses) for window, losses in measured[label].items()},
        )
        for label in order
    ]


def _tables(measured: Mapping[str, Losses]) -> dict[str, np.ndarray]:
    """Return [windows, ranges] of each candidate, with the windows in one order."""
    (first, losses), *_ = measured.items()
    windows = sorted(losses)
    for label, other in measured.items():
        if sorted(other) != windows:
            raise DataError(
                f"{label} was measured on other windows than {first}, so their losses cannot be compared; delete the "
                "folder of the trial and run it again."
            )
    return {label: np.array([other[window] for window in windows]) for label, other in measured.items()}


def _difference(values: np.ndarray, clusters: Sequence[str], comparisons: int) -> Difference:
    mean, error = standard_error(values)
    level = 1 - ALPHA / (2 * comparisons)
    half = t_quantile(len(values) - 1, level) * error
    if MIN_DOCUMENTS <= len(set(clusters)) < len(values):
        error, degrees = clustered_error(values, clusters)
        half = max(half, t_quantile(degrees, level) * error)
    return Difference(mean=mean, low=mean - half, high=mean + half)


def merge_ranges(values: Sequence[float], edges: Sequence[int], count: int) -> tuple[list[float], list[int]]:
    """Merge neighboring ranges beyond the old context until at most `count` are left, for a table."""
    counts = range_counts(edges)
    groups = np.array_split(np.arange(1, len(values)), min(count, len(values) - 1))
    merged = [float(np.average(np.asarray(values)[group], weights=counts[group])) for group in groups]
    return merged, [edges[1], *(edges[int(group[-1]) + 1] for group in groups)]


def is_finite(losses: np.ndarray) -> bool:
    return bool(np.isfinite(losses).all()) and math.isfinite(float(losses.sum()))
