"""CIP-n: documents in n equal pieces, all first pieces of a row, then all second ones, and so on.

In: packed rows. Out: the same tokens in another order, D1¹ D2¹ D3¹ D1² D2² D3² for n = 2, without marks.
Promise: a piece is at most one token longer than another of its document; a document below n tokens stays whole, among
the first pieces; pieces keep their order. Documents fill the row as under plain packing, so the last one is cut where
the row ends and the part that is in the row is split.
Rows attend in full: that is what makes the model look back over the others' pieces.
Differs from the public code of Untie the Knots, whose fast variant leaves documents where they are.
Elsewhere: filling rows, and what becomes of the rest of a cut document (pack.py).
"""

from collections.abc import Sequence

import numpy as np

from unspool.data.packing.store import Row


def interleave_rows(rows: Sequence[Row], pieces: int) -> list[Row]:
    """Several rows at once, which is faster; each is what it would be alone.

    They must have no padding, and all of them a mask or none.
    """
    num_docs = np.array([len(row.doc_lens) for row in rows])
    first_docs = np.cumsum(num_docs) - num_docs
    starts, lens, docs = _cut(np.concatenate([row.doc_lens for row in rows], dtype=np.int64), pieces)
    row_of = np.repeat(np.arange(len(rows)), num_docs)[docs]
    # They come by piece number and then by document, and keep that order within each row.
    order = np.argsort(row_of, kind="stable")
    starts, lens, docs, row_of = starts[order], lens[order], docs[order], row_of[order]

    texts = np.concatenate([row.tokens for row in rows])
    places = [*zip(starts.tolist(), (starts + lens).tolist(), strict=True)]
    tokens = np.concatenate([texts[start:stop] for start, stop in places])
    masks = [row.loss_mask for row in rows if row.loss_mask is not None]
    mask = None
    if masks:
        whole = np.concatenate(masks)
        mask = np.concatenate([whole[start:stop] for start, stop in places])
    piece_lens, chunk_ids = lens.astype(np.int32), (docs - first_docs[row_of]).astype(np.int32)
    ends = np.cumsum(np.bincount(row_of, minlength=len(rows))).tolist()
    made = []
    at = begin = 0
    for row, end in zip(rows, ends, strict=True):
        span, held = slice(at, at + len(row.tokens)), slice(begin, end)
        row_mask = None if mask is None else mask[span]
        made.append(Row(tokens[span], piece_lens[held], row_mask, row.source, "full", chunk_ids[held]))
        at, begin = span.stop, end
    return made


def _cut(lens: np.ndarray, pieces: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of documents that lie end to end: where each piece begins, its length and its document; all first ones first."""
    cuts = np.arange(pieces + 1)[:, None] * lens // pieces
    # All cuts of a short document but the first move to its end.
    cuts[1:] = np.where(lens < pieces, lens, cuts[1:])
    starts = cuts[:-1] + (np.cumsum(lens) - lens)
    sizes = np.diff(cuts, axis=0)
    docs = np.broadcast_to(np.arange(len(lens)), sizes.shape)
    filled = sizes > 0
    return starts[filled], sizes[filled], docs[filled]
