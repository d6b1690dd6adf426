"""One packed row, and what it trains on: labels and positions."""

from dataclasses import dataclass

import numpy as np

# Tokens that writers and packers hold in memory at a time, and that readers map at a time.
BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence. `loss_mask` is over target tokens (labels.py); None means all of them."""

    tokens: np.ndarray  # uint32[L]
    doc_lens: np.ndarray  # int32[k], sums to L
    loss_mask: np.ndarray | None  # bool[L]
    source: str  # the sources it holds, joined by "+"
    attention: str  # "intra_document" | "full"
    chunk_ids: np.ndarray | None = None  # int32[k]: pieces of one document share its number; None: all are different
    positions: np.ndarray | None = None  # int32[L]; None: 0, 1, 2 … in what attends to itself


IGNORE = -100


def labels(tokens: np.ndarray, doc_lens: np.ndarray, loss_mask: np.ndarray | None) -> np.ndarray:
    """int64[L]; IGNORE at each document's last token and before each masked token."""
    shifted = np.full(len(tokens), IGNORE, dtype=np.int64)
    shifted[:-1] = tokens[1:]
    shifted[np.cumsum(doc_lens) - 1] = IGNORE
    if loss_mask is not None:
        shifted[:-1][~loss_mask[1:].astype(bool)] = IGNORE
    return shifted


def num_trained(doc_lens: np.ndarray, loss_mask: np.ndarray) -> int:
    """How many labels of a row carry loss; the first token of a document is asked for by nothing."""
    starts = np.cumsum(doc_lens) - doc_lens
    return int(np.count_nonzero(loss_mask) - np.count_nonzero(loss_mask[starts]))


def attended_lens(doc_lens: np.ndarray, attention: str) -> np.ndarray:
    """The lengths that attention and positions go by: the documents, or the row as one if `attention` is full."""
    return doc_lens if attention == "intra_document" else doc_lens.sum(keepdims=True, dtype=doc_lens.dtype)


def position_ids(doc_lens: np.ndarray) -> np.ndarray:
    """int64[L], restarting at 0 in every document; give it `attended_lens` of the row."""
    lens = doc_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    return np.arange(lens.sum()) - np.repeat(starts, lens)
