"""How long documents are: histograms in powers of two, and tables made of them.

In: arrays of lengths. Out: plain dicts for manifests and `--json`. A histogram reads

    {"at_least": [512, 1024], "documents": [3, 1], "tokens": [1700, 1200]}

where a bin holds the lengths from `at_least` to below twice that. Bins without documents at both ends are left out.
Promise: sums are exact, and histograms of parts add up to the histogram of the whole.
Price: a threshold can be asked for only if it is a power of two. It means "at least": where ProLong's
Table 14 says ">4K", a document of exactly 4,096 tokens counts here and not there.
Elsewhere: tables for the terminal (cli/data_tables.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Histogram = dict[str, list[int]]

# From here on ProLong calls a document long (Table 3).
LONG = 64 << 10
# The columns of Table 14, and those of a length table: below the first, between two, from the last on.
SHARE_COLUMNS = (4 << 10, 8 << 10, 16 << 10, 32 << 10)
TABLE_EDGES = tuple(1 << power for power in range(13, 20))

_NUM_BINS = 54  # lengths stay below 2**53


class Lengths:
    """Counts lengths as they come."""

    def __init__(self) -> None:
        self._documents = np.zeros(_NUM_BINS, dtype=np.int64)
        self._tokens = np.zeros(_NUM_BINS, dtype=np.int64)

    def add(self, lens: np.ndarray) -> None:
        """All of them must be above 0: an empty document is a filter's business."""
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
    """One histogram of all."""
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


def summarize(lens: np.ndarray) -> dict[str, Any]:
    """One source's line of a length table; what is unknown without documents is None."""
    known = len(lens) > 0
    return {
        "documents": len(lens),
        "tokens": int(lens.sum()),
        "shortest": int(lens.min()) if known else None,
        "median": float(np.median(lens)) if known else None,
        "longest": int(lens.max()) if known else None,
        "lengths": histogram(lens),
    }


def length_table(lens_by_source: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """What `summarize` says of each source."""
    return {source: summarize(lens) for source, lens in lens_by_source.items()}


def from_length(lengths: Histogram, at_least: int) -> tuple[int, int]:
    """Documents and tokens of documents that have `at_least` tokens, such as Table 3's long ones."""
    assert at_least.bit_count() == 1, f"{at_least} is not a power of two"
    chosen = [place for place, edge in enumerate(lengths["at_least"]) if edge >= at_least]
    return sum(lengths["documents"][place] for place in chosen), sum(lengths["tokens"][place] for place in chosen)


def shares_from(lengths: Histogram, thresholds: Sequence[int] = SHARE_COLUMNS) -> list[float | None]:
    """Table 14: which share of the documents has at least so many tokens; None without documents."""
    total = sum(lengths["documents"])
    return [from_length(lengths, threshold)[0] / total if total else None for threshold in thresholds]


def by_edges(lengths: Histogram, edges: Sequence[int] = TABLE_EDGES) -> Histogram:
    """The same in the coarser bins of a table; the first begins at 0."""
    above = [(sum(lengths["documents"]), sum(lengths["tokens"])), *(from_length(lengths, edge) for edge in edges)]
    steps = [*above[1:], (0, 0)]
    return {
        "at_least": [0, *edges],
        "documents": [here[0] - further[0] for here, further in zip(above, steps, strict=True)],
        "tokens": [here[1] - further[1] for here, further in zip(above, steps, strict=True)],
    }


def imbalance_of(counts: Mapping[str, Any]) -> int:
    """By how many tokens the counts of rows, or of one source of them, do not add up; 0 is right."""
    into = counts["tokens_in"] + counts.get("tokens_added", 0)
    return int(into - counts["tokens"] - sum(counts["dropped"].values()))
