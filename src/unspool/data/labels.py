"""What a row trains on: labels and positions, from its documents' lengths and its loss mask.

In: a row's arrays. Out: `labels` (already shifted: the label at i is the token at i + 1) and `position_ids`.
Promise: no label crosses from one document, or one piece of a tangled row, into the next.
Rule for masks: `loss_mask` is over *target* tokens. loss_mask[i] == 0 means that token i is never
asked for, so the label at i - 1 is IGNORE. loss_mask[0] has no effect.
"""

import numpy as np

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
    return doc_lens if attention == "documents" else doc_lens.sum(keepdims=True, dtype=doc_lens.dtype)


def position_ids(doc_lens: np.ndarray) -> np.ndarray:
    """int64[L], restarting at 0 in every document; give it `attended_lens` of the row."""
    lens = doc_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    return np.arange(lens.sum()) - np.repeat(starts, lens)
