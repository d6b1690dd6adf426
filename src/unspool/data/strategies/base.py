"""Base class of packing strategies: a config class that fills rows, changes packed rows, or both.

A strategy is one key of a dataset in a recipe. Its class is in the file of its algorithm, imports heavy packages late,
and implements the whole interface. Checker, builder, model card and viewers contain no strategy's name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from unspool.core.config import Config
from unspool.data.packing.row import Row

if TYPE_CHECKING:
    from unspool.data.corpus.store import CorpusReader
    from unspool.data.packing.config import DatasetConfig
    from unspool.data.packing.pack import Packer
    from unspool.data.strategies.retrieval import Embed

Finish = Callable[[Sequence[Row]], Sequence[Row]]


@dataclass(frozen=True, kw_only=True)
class RowBuilder:
    """How to fill the rows of a dataset, and which columns they have."""

    pack: "Packer"
    masked: bool = False  # rows have a loss mask
    chunked: bool = False  # rows hold chunks of a document in several places
    arrays: bool = False  # documents must be arrays, instead of being read on slicing
    min_doc_len: int = 1  # shorter documents give no row
    borrows: bool = False  # rows also take text of documents that are not drawn, by `ShareKeeper.row_quotas`
    counts_documents: bool = True  # the tally counts documents and their lengths, not only tokens
    added_tokens: Mapping[str, int] = field(default_factory=dict)  # new vocabulary entries
    cost: Mapping[str, Any] = field(default_factory=dict)  # for the manifest; complete after the last row


@dataclass(frozen=True, kw_only=True)
class PackingInputs:
    """Inputs of strategies besides their config."""

    readers: "Mapping[str, CorpusReader]"
    tokenizer: Any
    pad: int
    seed: int
    name: str  # name of the dataset
    embed: "Embed | None" = None  # embeds texts, for strategies with an `embedder`

    @property
    def is_masked(self) -> bool:
        """Return whether some source has loss masks."""
        return any(reader.is_masked for reader in self.readers.values())


class StrategyConfig(Config):
    """Base class of strategies."""

    name: ClassVar[str]  # the key in a recipe
    title: ClassVar[str]  # on the model card, such as "tangled (Untie the Knots)"
    # Whether it puts chunks of one document in several places of a row. A dataset has at most one such strategy.
    moves_chunks: ClassVar[bool] = False
    sets_positions: ClassVar[bool] = False  # whether it sets the position ids of rows
    path_keys: ClassVar[tuple[str, ...]] = ()  # keys whose value is a file, a folder or a model
    uses_tokenizer: ClassVar[bool] = False  # whether rows depend on the tokenizer beyond their tokens

    def check(self, dataset: "DatasetConfig") -> None:
        """Raise ValueError, beginning with the wrong key, if the strategy does not fit the rest of the dataset."""

    def summary(self) -> str:
        """Describe the strategy in a few words, for viewers of the dataset."""
        return self.title

    @property
    def max_doc_len(self) -> int | None:
        """Return the length that longer documents are first cut into; None leaves them whole."""
        return None

    @property
    def keeps_chunk_order(self) -> bool:
        """Return whether chunks of one document keep their order in a row."""
        return True

    @property
    def embedder(self) -> str | None:
        """Return the folder or Hub id of the embedding model; None if the strategy needs none."""
        return None

    def build(self, dataset: "DatasetConfig", inputs: PackingInputs) -> RowBuilder | None:
        """Return how rows are filled; None: by the dataset's `packing`."""
        return None

    def finish(self, dataset: "DatasetConfig", inputs: PackingInputs) -> Finish | None:
        """Return a function that changes rows after they are packed; None if it changes none.

        It gets all rows of a dataset in order, in batches; the batch size must not affect the result.
        """
        return None
