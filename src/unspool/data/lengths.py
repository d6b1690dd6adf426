"""Histograms of document lengths in powers of two, and their tables.

A histogram is a plain dict for manifests and `--json`:

    {"at_least": [512, 1024], "documents": [3, 1], "tokens": [1700, 1200]}

A bin holds lengths from `at_least` to below twice that; empty bins at both ends are omitted. Sums are exact, and
histograms of parts add up to the histogram of the whole. Thresholds must be powers of two and mean "at least":
ProLong's Table 14 says ">4K", which excludes a document of exactly 4,096 tokens; here it counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Histogram = dict[str, list[int]]

# ProLong calls documents of at least this many tokens long (Table 3).
LONG = 64 << 10
# The columns of Table 14, and the bin edges of a length table.
SHARE_COLUMNS = (4 << 10, 8 << 10, 16 << 10, 32 << 10)
TABLE_EDGES = tuple(1 << power for power in range(13, 20))

_NUM_BINS = 54  # lengths stay below 2**53


class Lengths:
    """Count lengths incrementally."""

    def __init__(self) -> None:
        self._documents = np.zeros(_NUM_BINS, dtype=np.int64)
        self._tokens = np.zeros(_NUM_BINS, dtype=np.int64)

    def add(self, lens: np.ndarray) -> None:
        """Add lengths, which must be above 0; empty documents are filtered earlier."""
        assert lens.min(initial=1) > 0
        powers = np.frexp(lens.astype(np.float64))[1] - 1
        self._documents += np.bincount(powers, minlength=_NUM_BINS)
        self._tokens += np.bincount(powers, weights=lens, minlength=_NUM_BINS).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._tokens.sum())

    @property
    def num_documents(self) -> int:
        return int(self._documents.sum())

    def histogram(self) -> Histogram:
        filled = np.flatnonzero(self._documents)
        powers = range(int(filled[0]), int(filled[-1]) + 1) if len(filled) else range(0)
        return {
            "at_least": [1 << power for power in powers],
            "documents": [int(self._documents[power]) for power in powers],
            "tokens": [int(self._tokens[power]) for power in powers],
        }


def histogram(lens: np.ndarray) -> Histogram:
    counted = Lengths()
    counted.add(lens)
    return counted.histogram()


def add_up(histograms: Iterable[Histogram]) -> Histogram:
    """Sum histograms."""
    sums: dict[int, list[int]] = {}
    for each in histograms:
        for edge, documents, tokens in zip(each["at_least"], each["documents"], each["tokens"], strict=True):
            entry = sums.setdefault(edge, [0, 0])
            entry[0] += documents
            entry[1] += tokens
    edges = [1 << power for power in range(min(sums).bit_length() - 1, max(sums).bit_length())] if sums else []
    return {
        "at_least": edges,
        "documents": [sums.get(edge, [0, 0])[0] for edge in edges],
        "tokens": [sums.get(edge, [0, 0])[1] for edge in edges],
    }


def from_length(lengths: Histogram, at_least: int) -> tuple[int, int]:
    """Count the documents of at least `at_least` tokens, and their tokens."""
    assert at_least.bit_count() == 1, f"{at_least} is not a power of two"
    bins = [index for index, edge in enumerate(lengths["at_least"]) if edge >= at_least]
    return sum(lengths["documents"][index] for index in bins), sum(lengths["tokens"][index] for index in bins)


def shares_from(lengths: Histogram, thresholds: Sequence[int] = SHARE_COLUMNS) -> list[float | None]:
    """Return the shares of documents with at least these lengths, as in Table 14; None without documents."""
    total = sum(lengths["documents"])
    return [from_length(lengths, threshold)[0] / total if total else None for threshold in thresholds]


def by_edges(lengths: Histogram, edges: Sequence[int] = TABLE_EDGES) -> Histogram:
    """Convert a histogram to the coarser bins of a table; the first bin starts at 0."""
    above = [(sum(lengths["documents"]), sum(lengths["tokens"])), *(from_length(lengths, edge) for edge in edges)]
    steps = [*above[1:], (0, 0)]
    return {
        "at_least": [0, *edges],
        "documents": [here[0] - further[0] for here, further in zip(above, steps, strict=True)],
        "tokens": [here[1] - further[1] for here, further in zip(above, steps, strict=True)],
    }


def imbalance_of(counts: Mapping[str, Any]) -> int:
    """Return the number of tokens by which the counts of a dataset or source do not add up; 0 is correct."""
    into = counts["tokens_in"] + counts.get("tokens_added", 0)
    return int(into - counts["tokens"] - sum(counts["dropped"].values()))
