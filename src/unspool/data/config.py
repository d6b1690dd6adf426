"""What a recipe's `rows` and `engine` may say."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from unspool.base.config import Config
from unspool.base.sizes import Size
from unspool.data.engine import EngineConfig as EngineConfig


class TangleConfig(Config):
    """Untie the Knots: split documents, scatter the pieces, ask for the way back (METHODS in tangle.py)."""

    probability: float = Field(0.8, ge=0, le=1, description="share of documents that are split")
    hops: dict[int, float] = Field({2: 0.5, 3: 0.5}, description="pieces per split document: share of those documents")
    min_split: Size = Field(512, description="shorter documents stay whole (tokens)")
    longest: Size | None = Field(None, description="longer documents are first cut into several of this length")
    preserve_order: bool = Field(True, description="pieces of one document keep their order")
    backtrace: bool = Field(True, description="after the last piece, list the labels of all pieces")

    @field_validator("hops")
    @classmethod
    def _hops(cls, hops: dict[int, float]) -> dict[int, float]:
        if not hops or any(not 2 <= count <= 3 or share < 0 for count, share in hops.items()) or not sum(hops.values()):
            raise ValueError("hops needs counts of 2 or 3 with positive shares, such as {2: 0.5, 3: 0.5}")
        return hops


class RowsConfig(Config):
    """Fixed-length training rows made from documents."""

    from_: str | dict[str, float] = Field(alias="from", description="a source, or sources with shares of tokens")
    length: Size
    pack: Literal["concat", "whole", "intact", "fit"] = "concat"
    tangle: TangleConfig | None = None
    limit: Size | None = Field(None, description="stop after about this many tokens of rows")

    @property
    def shares(self) -> dict[str, float]:
        return {self.from_: 1.0} if isinstance(self.from_, str) else self.from_

    @field_validator("from_")
    @classmethod
    def _positive(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(value, dict) and (not value or min(value.values()) <= 0):
            raise ValueError("every share must be above 0, such as {wiki: 0.7, qa: 0.3}")
        return value

    @model_validator(mode="after")
    def _tangle_needs_room(self) -> "RowsConfig":
        if self.tangle and self.length < 4 * self.tangle.min_split:
            raise ValueError(f"tangle.min_split needs at most a quarter of length, here {self.length // 4}")
        if self.tangle and self.pack == "whole":
            raise ValueError("pack: whole puts one document in a row, so nothing can be tangled; use concat or intact")
        if self.tangle and self.pack == "fit":
            raise ValueError("pack: fit leaves padding that tangling has no place for; use concat or intact")
        return self
