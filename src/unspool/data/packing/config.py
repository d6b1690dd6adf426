"""The `datasets` of a recipe: how documents become packed rows."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator
from pydantic.fields import FieldInfo

from unspool.core.config import Config, Current, register
from unspool.core.sizes import Size
from unspool.data.packing.known_mixes import expand_mix
from unspool.data.strategies.base import StrategyConfig
from unspool.data.strategies.cip import CIP
from unspool.data.strategies.long_context_gain import LongContextGain
from unspool.data.strategies.nextlong import NExtLong
from unspool.data.strategies.pose import PoSE
from unspool.data.strategies.upsample import Upsample
from unspool.data.strategies.utk import UtK


class ReplaceConfig(Config):
    """Give a share of the tokens to another source, such as synthetic tasks."""

    with_: str = Field(alias="with", description="The other source. `from` must not name it.")
    share: float = Field(
        0.3,
        gt=0,
        lt=1,
        description="Share of tokens that the other source gets. The remaining sources keep their proportions.",
    )


class DatasetConfig(Config):
    """Packed rows of one length, made from documents."""

    from_: str | dict[str, float] = Field(
        alias="from",
        description="A source, several sources with their shares of tokens, or `mix:NAME` for a published mixture.",
    )
    seq_len: Size = Field(description="Tokens per packed row.")
    packing: Literal["concat", "single_doc", "truncate", "best_fit"] = Field(
        "concat",
        description="How documents fill rows. `concat`: end to end, cut documents continue in the next row; "
        "`truncate`: end to end, the rest of a cut document is dropped; `single_doc`: one document per "
        "row; `best_fit`: whole documents with the least padding.",
    )
    utk: UtK | None = Field(None, description="Untie the Knots: split documents and scatter their chunks over the row.")
    cip: CIP | None = Field(None, description="CIP: interleave the chunks of a row's documents.")
    nextlong: NExtLong | None = Field(
        None, description="NExtLong: insert similar text from other documents between the chunks of a document."
    )
    upsample: Upsample | None = Field(None, description="Use long documents more often, or short ones less often.")
    score: LongContextGain | None = Field(
        None, description="Score documents with a model, and use those with the highest scores (LongFilter)."
    )
    pose: PoSE | None = Field(None, description="PoSE: give short rows the positions of a longer context.")
    replace: ReplaceConfig | None = Field(
        None, description="Give a share of the tokens to another source, such as synthetic tasks."
    )
    attention: Literal["intra_document", "full"] | None = Field(
        None,
        description="`intra_document` applies a document mask; `full` is causal attention over the whole row. "
        "Default: `full` with `utk`, `cip` and `nextlong`, otherwise `intra_document`.",
    )
    limit: Size | None = Field(
        None, description="Stop after about this many tokens of rows. Default: use every source until one runs out."
    )
    max_epochs: int = Field(1, ge=1, description="How often each source may be read from start to end.")

    @model_serializer(mode="wrap")
    def _without_new_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit keys that are not set, so that datasets and studies from before these keys stay up to date."""
        values: dict[str, Any] = dump(self)
        return {key: value for key, value in values.items() if key != "score" or value is not None}

    @property
    def strategies(self) -> list[StrategyConfig]:
        """Return the strategies that are set, in the order of the registry."""
        return [found for name in STRATEGIES if (found := getattr(self, name, None)) is not None]

    @property
    def chunk_strategy(self) -> StrategyConfig | None:
        """Return the strategy that moves chunks of documents, if one is set."""
        return next((strategy for strategy in self.strategies if strategy.moves_chunks), None)

    @property
    def shares(self) -> dict[str, float]:
        """Return each source's share of tokens, in arbitrary units."""
        shares = {self.from_: 1.0} if isinstance(self.from_, str) else self.from_
        if self.replace is None:
            return shares
        left = (1 - self.replace.share) / sum(shares.values())
        return {name: share * left for name, share in shares.items()} | {self.replace.with_: self.replace.share}

    @property
    def max_doc_len(self) -> int | None:
        """Return the length above which documents are first cut into several."""
        return self.chunk_strategy.max_doc_len if self.chunk_strategy else None

    @field_validator("from_", mode="before")
    @classmethod
    def _known_mix(cls, value: Any) -> Any:
        return expand_mix(value)

    @field_validator("from_")
    @classmethod
    def _positive(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if isinstance(value, dict) and (not value or min(value.values()) <= 0):
            raise ValueError("every share must be above 0, such as {wiki: 0.7, qa: 0.3}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "DatasetConfig":
        chosen = [strategy.name for strategy in self.strategies if strategy.moves_chunks]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} both move chunks; keep one, or use two datasets")
        if chosen and self.packing == "single_doc":
            raise ValueError(
                f"packing: single_doc puts one document in a row, so {chosen[0]} has no chunks to mix; use concat or "
                "truncate"
            )
        if chosen and self.packing == "best_fit":
            raise ValueError(
                f"packing: best_fit leaves padding, which {chosen[0]} does not support; use concat or truncate"
            )
        if chosen and self.attention == "intra_document":
            raise ValueError(
                f"attention: intra_document hides the earlier chunks of a document, but {chosen[0]} trains the model "
                f"to attend to them; remove attention, or pack without {chosen[0]}"
            )
        for strategy in self.strategies:
            strategy.check(self)
        if self.replace and self.replace.with_ in ([self.from_] if isinstance(self.from_, str) else self.from_):
            raise ValueError(f"replace.with is {self.replace.with_!r}, which is already in from; use another source")
        return self


# A strategy is a field of `DatasetConfig`. These are the built-in ones; registered ones are added.
STRATEGIES: dict[str, type[StrategyConfig]] = {
    option.name: option
    for field in DatasetConfig.model_fields.values()
    for option in get_args(field.annotation)
    if isinstance(option, type) and issubclass(option, StrategyConfig)
}


def register_strategy(strategy: type[StrategyConfig]) -> type[StrategyConfig]:
    """Register a strategy, so that datasets may have its key; usable as a class decorator."""
    register(STRATEGIES, strategy.name, strategy, kind="strategy")
    annotation: Any = strategy | None
    DatasetConfig.__pydantic_fields__[strategy.name] = FieldInfo(annotation=annotation, default=None)
    DatasetConfig.model_rebuild(force=True)
    return strategy


# A dataset with all strategies that are registered at validation.
AnyDataset = Annotated[DatasetConfig, Current(DatasetConfig)]
