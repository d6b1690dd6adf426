"""One reader per kind of source, all alike: `units` divides the work, `read` gives one item per record."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from unspool.core.errors import DataError
from unspool.data.sources import chat, hub, jsonl, mds, parquet, repos, text, textbooks
from unspool.data.sources.archives import printable
from unspool.data.sources.base import Bad, Document, Item
from unspool.data.sources.config import FileSource, JsonlSource, RecallSource, Source, SyntheticSource, TextSource


class Reader(NamedTuple):
    units: Callable[[Any, Path], list[Path]]
    read: Callable[[Any, Sequence[Path], int], Iterator[Item]]


READERS = {
    "text": Reader(text.units, text.read),
    "jsonl": Reader(jsonl.units, jsonl.read),
    "parquet": Reader(parquet.units, parquet.read),
    "hf": Reader(hub.units, hub.read),
    "repos": Reader(repos.units, repos.read),
    "textbooks": Reader(textbooks.units, textbooks.read),
    "mds": Reader(mds.units, mds.read),
    "chat": Reader(chat.units, chat.read),
}


def file_source(source: Source) -> FileSource:
    """What is read from disk for a source: itself, or the prose that generated documents are built on."""
    if isinstance(source, RecallSource | SyntheticSource):
        assert source.prose is not None, "there is nothing to read"
        if ".jsonl" in Path(source.prose).name:
            return JsonlSource.model_validate({"kind": "jsonl", "path": source.prose})
        return TextSource.model_validate({"kind": "text", "path": source.prose})
    return source


def source_units(source: Source, root: Path) -> list[Path]:
    """The files, folders or archives of a source, sorted; ConfigError if there are none."""
    if isinstance(source, SyntheticSource) and source.prose is None:
        return []
    files = file_source(source)
    return READERS[files.kind].units(files, root)


def read_units(source: FileSource, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
    """Exactly one item per record, units in order."""
    return map(_storable, READERS[source.kind].read(source, units, seed))


def _storable(item: Item) -> Item:
    """The item, its name in UTF-8: a file system takes names in any bytes, a corpus does not."""
    name = item.file if isinstance(item, Bad) else item.id
    try:
        name.encode()
    except UnicodeEncodeError:
        return replace(item, file=printable(name)) if isinstance(item, Bad) else replace(item, id=printable(name))
    return item


def read_strictly(source: FileSource, units: Sequence[Path], seed: int = 0) -> Iterator[Document]:
    """The documents; DataError at the first record that cannot be read. For text that others depend on."""
    for item in read_units(source, units, seed):
        if isinstance(item, Bad):
            raise DataError(f"{item.file}, {item.record}: {item.detail}.")
        if isinstance(item, Document):
            yield item
