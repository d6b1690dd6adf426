"""Untie the Knots: split documents into chunks, scatter them over the row, train to restore the order."""

import copy
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from unspool.core.rng import rng_for
from unspool.core.sizes import Size
from unspool.data.strategies.base import PackingInputs, RowBuilder, StrategyConfig
from unspool.data.strategies.split_points import Split

if TYPE_CHECKING:
    from unspool.data.packing.config import DatasetConfig


MOST_HOPS = 8  # every cut has its own knots


class UtK(StrategyConfig):
    """Untie the Knots: split documents, scatter the chunks over the row, restore their order.

    Example:
        >>> import unspool
        >>> unspool.UtK(probability=0.8, hops={2: 0.5, 3: 0.5}).most_hops
        3
    """

    name: ClassVar[str] = "utk"
    title: ClassVar[str] = "tangled (Untie the Knots)"
    moves_chunks: ClassVar[bool] = True
    uses_tokenizer: ClassVar[bool] = True

    probability: float = Field(default=0.8, ge=0, le=1, description="Share of documents, or of rows, that are split.")
    per: Literal["document", "row"] = Field(
        default="document",
        description="Unit that `probability` applies to. With `row`, all documents of a chosen row are split.",
    )
    hops: dict[int, float] = Field(
        default={2: 0.5, 3: 0.5},
        description="Number of chunks per split document, from 2 to 8, and the share of documents with that number.",
    )
    chunk: Size | None = Field(
        default=None,
        description="Split documents into chunks of equal length, at most this long, instead of by `hops`. At most 8 "
        "chunks per document.",
    )
    split: Split = Field(
        default="random", description="How documents are split: at random points, or into chunks of equal length."
    )
    min_split: Size = Field(
        default=512,
        description="Documents shorter than this many tokens are never split. At most a quarter of `seq_len`.",
    )
    longest: Size | None = Field(
        default=None, description="Documents longer than this are first cut into several. Default: no limit."
    )
    preserve_order: bool = Field(
        default=True, description="Keep the chunks of a document in their original order within the row."
    )
    backtrace: bool = Field(
        default=True,
        description="After a document's last chunk, list the labels of all its chunks for the model to predict.",
    )
    mask: Literal["paper", "released"] = Field(
        default="paper",
        description="Which tokens have no loss. `paper`: knots, labels and the token that requests the labels; "
        "`released`: also the first token of text after a head knot or label, as in the paper's code.",
    )

    @field_validator("hops")
    @classmethod
    def _hops(cls, hops: dict[int, float]) -> dict[int, float]:
        if not hops or any(not 2 <= count <= 8 or share < 0 for count, share in hops.items()) or not sum(hops.values()):
            raise ValueError("hops must map counts of 2 to 8 to positive shares, such as {2: 0.5, 3: 0.5}")
        return hops

    def check(self, dataset: "DatasetConfig") -> None:
        if dataset.seq_len < 4 * self.min_split:
            raise ValueError(f"utk.min_split must be at most a quarter of seq_len, here {dataset.seq_len // 4}")

    def summary(self) -> str:
        return "tangled"

    @property
    def max_doc_len(self) -> int | None:
        return self.longest

    @property
    def most_hops(self) -> int:
        """Return the maximum number of chunks per document."""
        return MOST_HOPS if self.chunk else max(self.hops)

    @property
    def keeps_chunk_order(self) -> bool:
        return self.preserve_order

    def build(self, dataset: "DatasetConfig", inputs: PackingInputs) -> RowBuilder:
        from unspool.data.strategies.utk.tangle import build_tangler

        # Copy the tokenizer: the caller's belongs to a model that may never see a tangled row.
        tokenizer = copy.deepcopy(inputs.tokenizer)
        rng = rng_for(inputs.seed, "tangle", inputs.name)
        tangler = build_tangler(self, tokenizer, rng, keep_rest=dataset.packing == "concat")
        return RowBuilder(
            pack=tangler.pack,
            masked=True,
            chunked=True,
            arrays=True,
            counts_documents=False,
            added_tokens=tangler.knots,
            cost=tangler.counts,
        )
