"""What a recipe's `datasets` and `engine` may say."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config
from unspool.core.sizes import Size, format_size


class UtkConfig(Config):
    """Untie the Knots: split documents, scatter the pieces, ask for the way back (strategies/utk)."""

    probability: float = Field(0.8, ge=0, le=1, description="share of documents, or of rows, that are split")
    per: Literal["document", "row"] = Field("document", description="what probability is a share of")
    hops: dict[int, float] = Field({2: 0.5, 3: 0.5}, description="pieces per split document: share of those documents")
    split: Literal["random", "equal"] = Field("random", description="where documents are split")
    min_split: Size = Field(512, description="shorter documents stay whole (tokens)")
    longest: Size | None = Field(None, description="longer documents are first cut into several of this length")
    preserve_order: bool = Field(True, description="pieces of one document keep their order")
    backtrace: bool = Field(True, description="after the last piece, list the labels of all pieces")

    @field_validator("hops")
    @classmethod
    def _hops(cls, hops: dict[int, float]) -> dict[int, float]:
        if not hops or any(not 2 <= count <= 8 or share < 0 for count, share in hops.items()) or not sum(hops.values()):
            raise ValueError("hops needs counts of 2 to 8 with positive shares, such as {2: 0.5, 3: 0.5}")
        return hops


class CipConfig(Config):
    """CIP: documents in equal pieces, all first pieces of a row, then all second ones, … (strategies/cip.py)."""

    pieces: int = Field(2, ge=2, le=64, description="pieces per document")
    longest: Size | None = Field(None, description="longer documents are first cut into several of this length")


class NextLongConfig(Config):
    """NExtLong: after each chunk of a document, chunks of others that look most like it (strategies/nextlong.py)."""

    chunk: Size = Field(512, description="tokens of a chunk, at most")
    retriever: Literal["bm25", "embeddings"] = "bm25"
    model: str | None = Field(None, description="embeddings: folder or Hub id of the model whose states are compared")
    longest: Size | None = Field(
        None, description="longer documents are first cut into several of this length; by default a quarter of the row"
    )


class UpsampleConfig(Config):
    """Long documents several times, or fewer of the short ones; each source keeps its share (upsample.py)."""

    above: Size = Field(description="documents of at least this many tokens are long")
    times: float = Field(5.0, ge=1, description="how often a long document is used")
    keep: float = Field(1.0, ge=0, le=1, description="share of the other documents that is used")


class PoseConfig(Config):
    """PoSE: jumps in the positions of short rows, so that they show distances of long ones (strategies/pose.py)."""

    target: Size = Field(description="the context whose positions are shown")
    chunks: int = Field(2, ge=2, le=64, description="stretches without a jump")


class ReplaceConfig(Config):
    """Give a share of the tokens to another source, such as synthetic tasks."""

    with_: str = Field(alias="with", description="the source")
    share: float = Field(0.3, gt=0, lt=1, description="its share of tokens; the others keep their proportions")


# At most one of these decides where pieces of documents go.
STRATEGIES = ("utk", "cip", "nextlong")


class DatasetConfig(Config):
    """Fixed-length training rows made from documents."""

    from_: str | dict[str, float] = Field(alias="from", description="a source, or sources with shares of tokens")
    seq_len: Size
    packing: Literal["concat", "single_doc", "truncate", "best_fit"] = "concat"
    utk: UtkConfig | None = None
    cip: CipConfig | None = None
    nextlong: NextLongConfig | None = None
    upsample: UpsampleConfig | None = None
    pose: PoseConfig | None = None
    replace: ReplaceConfig | None = None
    attention: Literal["intra_document", "full"] | None = Field(
        None,
        description="intra_document: each sees only itself; full: the row is one; by default what the strategy needs",
    )
    limit: Size | None = Field(None, description="stop after about this many tokens of rows")

    @property
    def strategy(self) -> str | None:
        return next((name for name in STRATEGIES if getattr(self, name)), None)

    @property
    def shares(self) -> dict[str, float]:
        """Each source's share of tokens, in arbitrary units."""
        shares = {self.from_: 1.0} if isinstance(self.from_, str) else self.from_
        if self.replace is None:
            return shares
        left = (1 - self.replace.share) / sum(shares.values())
        return {name: share * left for name, share in shares.items()} | {self.replace.with_: self.replace.share}

    @property
    def longest(self) -> int | None:
        """Documents above this are cut into several before anything else."""
        chosen = self.utk or self.cip or self.nextlong
        return chosen.longest if chosen else None

    @field_validator("from_")
    @classmethod
    def _positive(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(value, dict) and (not value or min(value.values()) <= 0):
            raise ValueError("every share must be above 0, such as {wiki: 0.7, qa: 0.3}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "DatasetConfig":
        chosen = [name for name in STRATEGIES if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} both decide where pieces go; keep one, and use two datasets")
        if chosen and self.packing == "single_doc":
            raise ValueError(
                f"packing: single_doc puts one document in a row, so {chosen[0]} has nothing to mix; use concat or "
                "truncate"
            )
        if chosen and self.packing == "best_fit":
            raise ValueError(
                f"packing: best_fit leaves padding that {chosen[0]} has no place for; use concat or truncate"
            )
        if chosen and self.attention == "intra_document":
            raise ValueError(
                f"attention: intra_document hides the earlier pieces of a document, and {chosen[0]} is there to make "
                "the "
                "model look at them; leave attention out, or make the rows without it"
            )
        if self.utk and self.seq_len < 4 * self.utk.min_split:
            raise ValueError(f"utk.min_split needs at most a quarter of seq_len, here {self.seq_len // 4}")
        if self.nextlong and self.seq_len < 2 * self.nextlong.chunk:
            raise ValueError(f"nextlong.chunk needs at most half of seq_len, here {self.seq_len // 2}")
        if self.nextlong and self.nextlong.longest and self.seq_len < 2 * self.nextlong.longest:
            raise ValueError(f"nextlong.longest needs at most half of seq_len, here {self.seq_len // 2}, to leave room")
        if self.nextlong and (self.nextlong.retriever == "embeddings") != (self.nextlong.model is not None):
            raise ValueError("nextlong.model is needed with retriever: embeddings, and only there")
        if self.pose and self.pose.target <= self.seq_len:
            raise ValueError(
                f"pose.target must be above seq_len ({format_size(self.seq_len)}), or there is nothing to skip"
            )
        if self.replace and self.replace.with_ in ([self.from_] if isinstance(self.from_, str) else self.from_):
            raise ValueError(f"replace.with is {self.replace.with_!r}, which from names already; name another source")
        return self
