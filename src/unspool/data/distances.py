"""Exact counts of distances between tokens of one document in packed rows, without a loop over tokens.

A pair counts if both tokens are text of one document in one row and one can attend to the other. A distance is a
difference of positions, so skipped positions and special tokens between two texts count. The time grows with the square
of the number of a document's stretches in one row, not with its tokens.

Two stretches of m and n consecutive positions, the second g positions after the end of the first, have a pair at
distance g + 1 + u + v for every 0 ≤ u < m and 0 ≤ v < n: a trapezoid over distances. Up to a distance it holds a
triangle of pairs (u, v) minus those with u ≥ m or v ≥ n: four triangular numbers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unspool.data.packing.row import Row

# Pairs of stretches that are counted at once; limits memory to about 100 MB.
_AT_ONCE = 1 << 17


class Stretches(NamedTuple):
    """Runs of text with consecutive positions."""

    starts: np.ndarray  # int64, the position of the first token
    lens: np.ndarray  # int64
    docs: np.ndarray  # int64; stretches with the same number can attend to each other


def stretches_of(row: Row, is_text: np.ndarray | None = None) -> Stretches:
    """Find the text of one row; `is_text` is bool[L], None means all tokens."""
    lens = row.doc_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    docs = np.arange(len(lens))
    if row.chunk_ids is not None and row.attention != "intra_document":
        docs = row.chunk_ids.astype(np.int64)
    if is_text is None and row.positions is None:
        return Stretches(starts, lens, docs)
    positions = np.arange(len(row.tokens)) if row.positions is None else row.positions.astype(np.int64)
    is_text = np.ones(len(row.tokens), dtype=np.bool_) if is_text is None else is_text
    begins = np.ones(len(row.tokens), dtype=np.bool_)
    begins[1:] = (np.diff(positions) != 1) | (is_text[1:] != is_text[:-1])
    begins[starts] = True
    firsts = np.flatnonzero(begins)
    pieces = np.searchsorted(starts, firsts, side="right") - 1
    kept = is_text[firsts]
    return Stretches(positions[firsts][kept], np.diff(firsts, append=len(row.tokens))[kept], docs[pieces][kept])


def stretches_of_documents(row: Row) -> Stretches:
    """Find the text of one row with each document's chunks joined, as before a strategy moved them."""
    assert row.chunk_ids is not None
    lens = np.bincount(row.chunk_ids, weights=row.doc_lens).astype(np.int64)
    return Stretches(np.cumsum(lens) - lens, lens, np.arange(len(lens)))


def doublings(reach: int) -> list[int]:
    """Return the powers of two below `reach`: 1, 2, 4 …."""
    return [1 << power for power in range(max(1, (reach - 1).bit_length()))]


def join_rows(rows: Sequence[Stretches]) -> Stretches:
    """Join the stretches of several rows; documents of different rows stay separate."""
    ends = np.cumsum([0, *(int(one.docs.max(initial=-1)) + 1 for one in rows)]).tolist()
    docs = [one.docs + end for one, end in zip(rows, ends, strict=False)]
    return Stretches(
        np.concatenate([one.starts for one in rows]), np.concatenate([one.lens for one in rows]), np.concatenate(docs)
    )


def count_pairs(text: Stretches, edges: Sequence[int]) -> np.ndarray:
    """Count pairs by distance: int64[len(edges)], each from one edge to below the next; the last one is open-ended.

    `edges` rise from 1 or more. Stretches of one document must not overlap.
    """
    order = np.lexsort((text.starts, text.docs))
    starts, lens, docs = (values[order] for values in text)
    # Pair each stretch with itself and with all later stretches of its document.
    counts = np.searchsorted(docs, docs, side="right") - np.arange(len(docs))
    totals = np.append(0, np.cumsum(counts))
    far = int((starts + lens).max(initial=0) - starts.min(initial=0))
    # A stretch paired with itself counts (i, j) and (j, i); distances of 0 and below cancel in the difference.
    below = np.array([*(edge - 1 for edge in edges), max(far, edges[-1])])
    up_to = np.zeros(len(below), dtype=np.int64)
    at = 0
    while at < len(docs):
        # At least one stretch at a time, even if it has more pairs than the limit.
        stop = max(at + 1, int(np.searchsorted(totals, totals[at] + _AT_ONCE, side="right")) - 1)
        first = np.repeat(np.arange(at, stop), counts[at:stop])
        second = first + np.arange(len(first)) - np.repeat(totals[at:stop] - totals[at], counts[at:stop])
        m, n = lens[first], lens[second]
        left = below[:, None] - (starts[second] - starts[first] - m + 1)
        up_to += (_triangle(left) - _triangle(left - m) - _triangle(left - n) + _triangle(left - m - n)).sum(axis=1)
        at = stop
    pairs: np.ndarray = np.diff(up_to)
    return pairs


def _triangle(size: np.ndarray) -> np.ndarray:
    """Count pairs (u, v) of non-negative integers with a sum of at most `size`."""
    size = np.maximum(size, -1)
    pairs: np.ndarray = (size + 1) * (size + 2) // 2
    return pairs
