"""Base classes of sources, and the items that a source yields.

A source kind is one file: a subclass of `Source` with its settings and its reader, and one line in registry.py.
Slow imports (pyarrow, transformers) belong inside its methods, so that checking a recipe stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from unspool.core.config import Config
from unspool.core.errors import DataError
from unspool.core.sizes import Size, format_count
from unspool.data.sources.aggregation.config import Aggregation
from unspool.data.sources.files import files_below, find_files, matching_files, printable
from unspool.data.sources.gzip_ratio import GzipRatio

# Importing this takes seconds, in every worker process.
if TYPE_CHECKING:
    from unspool.data.tokenize.encoder import Encoder

# Longer records are quarantined: a book has about 1 MB, and a runaway line must not fill memory.
MAX_RECORD_BYTES = 64 << 20
# Input bytes per task: enough to outweigh the start of a task, small enough to lose little in a kill.
TASK_BYTES = 8 << 20
# A fast tokenizer must agree with the model's tokenizer on this much text from each of several units.
SAMPLE_UNITS = 16
SAMPLE_CHARS = 1 << 16
SAMPLE_RECORDS = 10_000  # maximum per unit, so that a file of bad records is not read completely
# Estimates for text that is not tokenized yet.
CHARS_PER_TOKEN = 4.0
EXPANSION = {".zst": 3.0, ".gz": 3.0, ".bz2": 3.5, ".xz": 3.5, ".zip": 3.0, ".tgz": 3.0, ".parquet": 2.0, ".whl": 3.0}


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    id: str  # "<file name>:<record number>", counted from 1 as editors count lines
    text: str
    tokens: np.ndarray | None = None  # uint32, if the source is already tokenized; `text` may then be empty
    left_out: tuple[tuple[str, str], ...] = ()  # skipped parts of a document: (name, reason)
    messages: tuple[Message, ...] = ()  # a conversation that is not rendered yet; then `text` is empty
    loss_mask: np.ndarray | None = None  # bool, over target tokens; None means all of them


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read; it goes to the quarantine file."""

    file: str
    record: str  # "line 17", "record 3", "after line 40"
    reason: str  # a short name to count by, such as "invalid_utf8"
    detail: str  # a sentence for users


@dataclass(frozen=True, slots=True)
class Filtered:
    """A record that was read and deliberately skipped, counted by reason."""

    id: str
    reason: str  # such as "empty"


Item = Document | Bad | Filtered


class Estimate(NamedTuple):
    """Estimated size of a source before it is tokenized."""

    tokens: int | None  # None if unknown
    why: str  # origin of the number
    document_len: float | None = None  # mean tokens per document, if known


class Source(Config):
    """A source of documents: the settings of one kind, and its interface to the rest of the package.

    A subclass narrows `kind` to a Literal with one name and implements `units`, `divide`, `read` and `estimate`.
    """

    kind: str = Field(description="Kind of source.")

    path_keys: ClassVar[tuple[str, ...]] = ()  # keys whose paths recipes resolve and check
    file_endings: ClassVar[tuple[str, ...]] = ()  # suffixes of single files that are recognized as this kind
    seeded: ClassVar[bool] = False  # documents depend on the seed
    generated: ClassVar[bool] = False  # documents are generated instead of read
    is_chat: ClassVar[bool] = False  # documents are conversations, which a chat template renders

    @property
    def token_limit(self) -> int | None:
        """Stop after about this many tokens; None reads everything."""
        return None

    @property
    def max_bad_share(self) -> float:
        """Return the share of unreadable records above which the build fails."""
        return 0.0

    @property
    def ratio_filter(self) -> GzipRatio | None:
        """Return which documents to keep by their gzip ratio; None keeps all."""
        return None

    @property
    def inserted_tasks(self) -> Aggregation | None:
        """Return which tasks to insert into documents; None inserts none."""
        return None

    @property
    def depends_on_seed(self) -> bool:
        return self.seeded or self.inserted_tasks is not None

    @property
    def paths(self) -> dict[str, str]:
        """Return the paths that are set, by key."""
        return {key: value for key in self.path_keys if (value := getattr(self, key)) is not None}

    def with_paths(self, resolve: Callable[[str], str]) -> Self:
        """Return a copy whose paths are resolved."""
        return self.model_copy(update={key: resolve(value) for key, value in self.paths.items()})

    def may_be_remote(self, path: str) -> bool:
        """Return whether a path that does not exist locally may still be readable, such as a Hub id."""
        return False

    def chat_template(self, root: Path) -> str | None:
        """Return the text of a template that replaces the tokenizer's chat template."""
        return None

    def units(self, root: Path) -> list[Path]:
        """List the units to read (files, folders or archives), sorted; ConfigError if there are none."""
        raise NotImplementedError

    def input_files(self, units: Sequence[Path]) -> list[tuple[Path, Path]]:
        """List (unit, file) for every file whose content the documents depend on."""
        return [(unit, file) for unit in units for file in files_below(unit)]

    def content_marks(self, units: Sequence[Path]) -> list[Any] | None:
        """Return marks that identify the content of remote units; None if the units are local files to hash."""
        return None

    def limited(self, tokens: int | None) -> Self:
        """Return a copy that stops at the `tokens` a recipe needs, for sources that stream; None: unknown."""
        return self

    def has_loss_masks(self, units: Sequence[Path]) -> bool:
        """Return whether some documents have a loss mask; then all documents of the corpus get one."""
        return self.is_chat

    def divide(self, units: list[Path], seed: int) -> list[Any]:
        """Divide the work into picklable tasks. Each writes one shard, so the division must not depend on workers."""
        raise NotImplementedError

    def spill_tasks(self, units: list[Path]) -> list[Any]:
        """Divide the work of a first pass that sorts the input on disk; empty for a source without one.

        `spill` is called for each task, then `divide_spilled` replaces `divide`. Both get the number of parts from
        `num_parts`, which must not depend on workers.
        """
        return []

    def num_parts(self, units: list[Path]) -> int:
        """Return the number of parts that the first pass divides the input into."""
        raise NotImplementedError

    def spill(self, task: Any, number: int, num_parts: int, folder: Path, seed: int) -> None:
        """Write the output of task `number` of the first pass into the folder, as a run of spill.py."""
        raise NotImplementedError

    def divide_spilled(self, folder: Path, num_parts: int) -> list[Any]:
        """Return the tasks that read the output of the first pass."""
        raise NotImplementedError

    def read(self, task: Any, seed: int, encoder: Encoder | None = None) -> Iterator[Item]:
        """Yield exactly one item per record of a task, in order.

        A truncated file counts as one more `Bad` record, because its number of records is unknown.
        """
        raise NotImplementedError

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        """Yield texts from across the source, to check a fast tokenizer."""
        raise NotImplementedError

    def estimate(self) -> Estimate:
        """Estimate tokens without reading; paths must be resolved."""
        raise NotImplementedError


class FileSource(Source):
    """Common settings of sources that are read from files. A subclass implements `read_units`."""

    path: str = Field(description="A file, a folder or a glob pattern.")
    limit: Size | None = Field(None, description="Stop after about this many tokens. Default: read everything.")
    max_bad: float = Field(
        0.001, ge=0, le=1, description="Largest share of unreadable records. Above it, the run stops."
    )

    path_keys: ClassVar[tuple[str, ...]] = ("path",)
    endings: ClassVar[tuple[str, ...]] = ("",)  # suffixes of the files that are read from a folder

    @property
    def token_limit(self) -> int | None:
        return self.limit

    @property
    def max_bad_share(self) -> float:
        return self.max_bad

    def units(self, root: Path) -> list[Path]:
        return find_files(self.path, root, kind=self.kind, endings=self.endings)

    def divide(self, units: list[Path], seed: int) -> list[list[Path]]:
        return group_units(units, TASK_BYTES)

    def read(self, task: Sequence[Path], seed: int = 0, encoder: Encoder | None = None) -> Iterator[Item]:
        return self.read_units(task, seed)

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        """Yield exactly one item per record, units in order. Subclasses implement this."""
        raise NotImplementedError

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        for index in np.unique(np.linspace(0, len(units) - 1, SAMPLE_UNITS).astype(int)):
            chars = 0
            for item in islice(read_items(self, [units[index]], seed), SAMPLE_RECORDS):
                if isinstance(item, Document):
                    if item.tokens is not None:
                        return  # enough text
                    yield item.text[: SAMPLE_CHARS - chars]
                    chars += len(item.text)
                if chars >= SAMPLE_CHARS:
                    break

    def estimate(self) -> Estimate:
        files = list(matching_files(self.path))
        if not files:
            why = f"{self.path} is not on this machine"
            return Estimate(self.limit, f"its limit; {why}" if self.limit else why)
        tokens = self.estimate_tokens(files)
        if self.ratio_filter is not None and self.ratio_filter.middle is not None:
            tokens = int(tokens * self.ratio_filter.middle)
        size = format_count(sum(file.stat().st_size for file in files))
        found = f"{len(files)} file{'s' * (len(files) > 1)} of {size}B"
        if self.limit and self.limit < tokens:
            return Estimate(self.limit, f"its limit, of {found}")
        return Estimate(tokens, f"from {found}")

    def estimate_tokens(self, files: Sequence[Path]) -> int:
        """Estimate tokens from file sizes: `CHARS_PER_TOKEN`, and typical compression ratios."""
        chars = sum(file.stat().st_size * EXPANSION.get(file.suffix, 1.0) for file in files)
        return int(chars / CHARS_PER_TOKEN)


class TextFileSource(FileSource):
    """Files of documents with text, which can be filtered and extended before they are tokenized."""

    gzip_ratio: GzipRatio | None = Field(
        None, description="Keep documents by how well gzip compresses them. Default: keep all."
    )
    aggregation: Aggregation | None = Field(
        None, description="Insert questions about whole sections of a document after these sections. Default: none."
    )

    @model_serializer(mode="wrap")
    def _without_new_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit keys that are not set, so that corpora from before these keys stay up to date."""
        values: dict[str, Any] = dump(self)
        new = ("gzip_ratio", "aggregation")
        return {key: value for key, value in values.items() if key not in new or value is not None}

    @property
    def ratio_filter(self) -> GzipRatio | None:
        return self.gzip_ratio

    @property
    def inserted_tasks(self) -> Aggregation | None:
        return self.aggregation


def group_units(units: Sequence[Path], num_bytes: int) -> list[list[Path]]:
    """Group consecutive units; a group ends when it reaches `num_bytes`."""
    groups: list[list[Path]] = [[]]
    size = 0
    for unit in units:
        if size >= num_bytes:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += sum(file.stat().st_size for file in files_below(unit))
    return groups


def read_items(source: Source, task: Any, seed: int = 0, encoder: Encoder | None = None) -> Iterator[Item]:
    """Yield the items of `source.read`, with names converted to valid UTF-8 (file systems allow any bytes)."""
    for item in source.read(task, seed, encoder):
        name = item.file if isinstance(item, Bad) else item.id
        try:
            name.encode()
        except UnicodeEncodeError:
            name = printable(name)
            yield replace(item, file=name) if isinstance(item, Bad) else replace(item, id=name)
        else:
            yield item


def read_strictly(source: FileSource, units: Sequence[Path], seed: int = 0) -> Iterator[Document]:
    """Yield the documents; DataError at the first unreadable record."""
    for item in read_items(source, units, seed):
        if isinstance(item, Bad):
            raise DataError(f"{item.file}, {item.record}: {item.detail}.")
        if isinstance(item, Document):
            yield item
