"""What a packing strategy is: a config class that fills rows, changes packed rows, or both.

A strategy is one key of a dataset in a recipe. Its class lives in the file of its algorithm, imports heavy packages
late, and answers whatever others ask: the checker, the builder, the model card and the viewers know no names.
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
    """How the rows of a dataset are filled, and what they bring along."""

    pack: "Packer"
    masked: bool = False  # rows have a loss mask
    chunked: bool = False  # rows have chunks of one document in several places
    arrays: bool = False  # documents must be arrays, not read when sliced
    min_doc_len: int = 1  # shorter documents give no row of their own
    borrows: bool = False  # rows take text of documents other than those drawn, by `ShareKeeper.row_quotas`
    counts_documents: bool = True  # the tally gets documents and their lengths, not only tokens
    added_tokens: Mapping[str, int] = field(default_factory=dict)  # new in the vocabulary
    cost: Mapping[str, Any] = field(default_factory=dict)  # for the manifest, complete when the last row is made


@dataclass(frozen=True, kw_only=True)
class PackingInputs:
    """What strategies may need besides their config."""

    readers: "Mapping[str, CorpusReader]"
    tokenizer: Any
    pad: int
    seed: int
    name: str  # of the dataset
    embed: "Embed | None" = None  # embeds texts, for strategies with an `embedder`

    @property
    def is_masked(self) -> bool:
        """Whether some source has loss masks."""
        return any(reader.is_masked for reader in self.readers.values())


class StrategyConfig(Config):
    """Base class of strategies."""

    name: ClassVar[str]  # the key in a recipe
    title: ClassVar[str]  # on the model card, such as "tangled (Untie the Knots)"
    # Whether it puts chunks of one document in several places of a row. A dataset has at most one such strategy.
    moves_chunks: ClassVar[bool] = False
    sets_positions: ClassVar[bool] = False  # whether rows get position ids of their own
    path_keys: ClassVar[tuple[str, ...]] = ()  # keys that name a file, a folder or a model
    uses_tokenizer: ClassVar[bool] = False  # whether rows depend on the tokenizer beyond their tokens

    def check(self, dataset: "DatasetConfig") -> None:
        """Raise ValueError, beginning with the key at fault, if the strategy does not fit the rest of the dataset."""

    def summary(self) -> str:
        """Describe the strategy in a few words, for people who look at the dataset."""
        return self.title

    @property
    def max_doc_len(self) -> int | None:
        """Longer documents are cut into several of this length before anything else; None leaves them whole."""
        return None

    @property
    def keeps_chunk_order(self) -> bool:
        """Whether chunks of one document keep their order in a row."""
        return True

    @property
    def embedder(self) -> str | None:
        """The folder or Hub id of the model that embeds texts for this strategy; None if it needs none."""
        return None

    def build(self, dataset: "DatasetConfig", inputs: PackingInputs) -> RowBuilder | None:
        """Say how rows are filled; None leaves that to the dataset's `packing`."""
        return None

    def finish(self, dataset: "DatasetConfig", inputs: PackingInputs) -> Finish | None:
        """Return a function that changes rows after they are packed; None if they stay as they are.

        It gets all rows of a dataset in order, some at a time; how many must make no difference.
        """
        return None
