"""CIP-n: documents in n equal chunks; a row has all first chunks, then all second ones, and so on.

D1¹ D2¹ D3¹ D1² D2² D3² for n = 2, without special tokens. Rows attend in full, which makes the model look back over
the chunks of other documents. The fast variant in the public code of Untie the Knots differs: it leaves documents in
place.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from unspool.core.sizes import Size
from unspool.data.packing.row import Row
from unspool.data.strategies.base import Finish, PackingInputs, RowBuilder, StrategyConfig

if TYPE_CHECKING:
    from unspool.data.packing.config import DatasetConfig


class CipConfig(StrategyConfig):
    """CIP: documents in equal chunks; all first chunks of a row, then all second ones, …"""

    name: ClassVar[str] = "cip"
    title: ClassVar[str] = "interleaved (CIP)"
    moves_chunks: ClassVar[bool] = True

    pieces: int = Field(2, ge=2, le=64, description="chunks per document")
    longest: Size | None = Field(None, description="longer documents are first cut into several of this length")

    def summary(self) -> str:
        return f"interleaved in {self.pieces} chunks"

    @property
    def max_doc_len(self) -> int | None:
        return self.longest

    def build(self, dataset: "DatasetConfig", inputs: PackingInputs) -> RowBuilder:
        from unspool.data.packing.pack import PACKERS

        # Documents fill rows as usual; `finish` changes only the order within a row.
        return RowBuilder(pack=PACKERS[dataset.packing], masked=inputs.is_masked, chunked=True)

    def finish(self, dataset: "DatasetConfig", inputs: PackingInputs) -> Finish:
        return partial(interleave_rows, pieces=self.pieces)


def interleave_rows(rows: Sequence[Row], pieces: int) -> list[Row]:
    """Interleave the chunks of several rows at once; each row is what it would be alone.

    A chunk is at most one token longer than another of its document. A document below `pieces` tokens stays whole
    among the first chunks. Rows must have no padding, and all of them a loss mask or none.
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
        owners = chunk_ids[held]
        sources = None if row.sources is None else [row.sources[doc] for doc in owners.tolist()]
        made.append(Row(tokens[span], piece_lens[held], row_mask, row.source, "full", owners, sources=sources))
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
