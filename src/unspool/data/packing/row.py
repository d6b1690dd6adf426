"""One packed row, its labels and its positions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Maximum number of tokens that writers and packers hold in memory, and that readers map, at a time.
BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row. `loss_mask` is over target tokens; None means that all are trained on."""

    tokens: np.ndarray  # uint32[L]
    doc_lens: np.ndarray  # int32[k], sums to L
    loss_mask: np.ndarray | None  # bool[L]
    source: str  # names of its sources, joined by "+"
    attention: str  # "intra_document" | "full"
    chunk_ids: np.ndarray | None = None  # int32[k]: pieces of one document have the same number; None: all differ
    positions: np.ndarray | None = None  # int32[L]; None: 0, 1, 2 … in each part that attends to itself
    # Set only during packing:
    sources: Sequence[str] | None = None  # of each entry of doc_lens, "" for padding; None: `source` for all
    added: np.ndarray | None = None  # bool[L]: special tokens, which belong to no source


IGNORE = -100


def labels(tokens: np.ndarray, doc_lens: np.ndarray, loss_mask: np.ndarray | None) -> np.ndarray:
    """Return int64[L]: the next tokens, IGNORE at each document's last token and before each masked token."""
    shifted = np.full(len(tokens), IGNORE, dtype=np.int64)
    shifted[:-1] = tokens[1:]
    shifted[np.cumsum(doc_lens) - 1] = IGNORE
    if loss_mask is not None:
        shifted[:-1][~loss_mask[1:].astype(bool)] = IGNORE
    return shifted


def num_trained(doc_lens: np.ndarray, loss_mask: np.ndarray) -> int:
    """Count the labels of a row that carry loss; the first token of a document is never a prediction target."""
    starts = np.cumsum(doc_lens) - doc_lens
    return int(np.count_nonzero(loss_mask) - np.count_nonzero(loss_mask[starts]))


def trained_by_source(row: Row) -> dict[str, int]:
    """Count the labels of a row that carry loss, by the source of their tokens."""
    starts = np.cumsum(row.doc_lens) - row.doc_lens
    counted = np.ones(len(row.tokens), dtype=np.bool_) if row.loss_mask is None else row.loss_mask.copy()
    if row.added is not None:
        counted &= ~row.added
    counted[starts] = False
    if row.sources is None:
        return {row.source: int(np.count_nonzero(counted))}
    found: Counter[str] = Counter()
    for name, count in zip(row.sources, np.add.reduceat(counted, starts, dtype=np.int64).tolist(), strict=True):
        found[name] += count
    return found


def attended_lens(doc_lens: np.ndarray, attention: str) -> np.ndarray:
    """Return the lengths for attention and positions: the documents', or the row's if `attention` is full."""
    return doc_lens if attention == "intra_document" else doc_lens.sum(keepdims=True, dtype=doc_lens.dtype)


def position_ids(doc_lens: np.ndarray) -> np.ndarray:
    """Return int64[L], restarting at 0 in every document; pass the row's `attended_lens`."""
    lens = doc_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    return np.arange(lens.sum()) - np.repeat(starts, lens)
