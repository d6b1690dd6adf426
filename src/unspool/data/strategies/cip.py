"""CIP-n: documents in n chunks; a row has all first chunks, then all second ones, and so on.

Documents are split at random points, as in the baseline of Untie the Knots; equal chunks are an option. For n = 2, a
row is D1¹ D2¹ D3¹ D1² D2² D3², without special tokens. Rows use full attention, so that the model attends across the
chunks of other documents. The fast variant in the public code of Untie the Knots differs: it leaves documents in place.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from unspool.core.rng import rng_for
from unspool.core.sizes import Size
from unspool.data.packing.row import Row
from unspool.data.strategies.base import Finish, PackingInputs, RowBuilder, StrategyConfig
from unspool.data.strategies.split_points import SPLIT_POINTS, Split

if TYPE_CHECKING:
    from unspool.data.packing.config import DatasetConfig


class CIP(StrategyConfig):
    """CIP: split documents into chunks; a row holds all first chunks, then all second ones, …

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> texts = ["The sea was calm and the ship went on. " * 40] * 8
        >>> dataset = unspool.pack(texts, tokenizer, seq_len=512, strategy=unspool.CIP(pieces=2))
        >>> dataset[0].attention
        'full'
    """

    name: ClassVar[str] = "cip"
    title: ClassVar[str] = "interleaved (CIP)"
    moves_chunks: ClassVar[bool] = True

    pieces: int = Field(default=2, ge=2, le=64, description="Chunks per document.")
    split: Split = Field(
        default="random", description="How documents are split: at random points, or into chunks of equal length."
    )
    longest: Size | None = Field(
        default=None, description="Documents longer than this are first cut into several. Default: no limit."
    )

    def summary(self) -> str:
        return f"interleaved in {self.pieces} chunks"

    @property
    def max_doc_len(self) -> int | None:
        return self.longest

    def build(self, dataset: "DatasetConfig", inputs: PackingInputs) -> RowBuilder:
        from unspool.data.packing.pack import PACKERS

        # Documents fill rows as without a strategy; `finish` changes only the order within a row.
        return RowBuilder(pack=PACKERS[dataset.packing], masked=inputs.is_masked, chunked=True)

    def finish(self, dataset: "DatasetConfig", inputs: PackingInputs) -> Finish:
        rng = rng_for(inputs.seed, "cip", inputs.name)
        return partial(interleave_rows, pieces=self.pieces, split=self.split, rng=rng)


def interleave_rows(rows: Sequence[Row], pieces: int, split: Split, rng: np.random.Generator) -> list[Row]:
    """Interleave the chunks within each of several rows; rows do not affect each other.

    Random points are distinct and uniform; equal chunks differ by at most one token. A document shorter than `pieces`
    tokens stays whole, with the first chunks. Rows must have no padding, and either all or none have a loss mask.
    """
    num_docs = np.array([len(row.doc_lens) for row in rows])
    first_docs = np.cumsum(num_docs) - num_docs
    doc_lens = np.concatenate([row.doc_lens for row in rows], dtype=np.int64)
    # The same number of draws for every document, so that the batch size does not affect the result.
    draws = rng.random((len(doc_lens), pieces - 1))
    points = SPLIT_POINTS[split](draws, doc_lens, np.where(doc_lens < pieces, 1, pieces))
    starts, lens, docs = _cut(doc_lens, points)
    row_of = np.repeat(np.arange(len(rows)), num_docs)[docs]
    # They are sorted by piece number and then by document, and keep that order within each row.
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


def _cut(lens: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut concatenated documents: return start, length and document of each piece, all first pieces first."""
    cuts = np.concatenate([np.zeros_like(lens)[None], points.T, lens[None]])
    starts = cuts[:-1] + (np.cumsum(lens) - lens)
    sizes = np.diff(cuts, axis=0)
    docs = np.broadcast_to(np.arange(len(lens)), sizes.shape)
    filled = sizes > 0
    return starts[filled], sizes[filled], docs[filled]
