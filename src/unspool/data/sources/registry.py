"""All source kinds by name, and the type of a recipe's `sources` entries."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from unspool.core.config import FromRegistry, register, tag_value
from unspool.core.errors import ConfigError
from unspool.data.sources.base import Document, FileSource, Source, read_items
from unspool.data.sources.chat import ChatSource
from unspool.data.sources.hub import HfSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.mds import MdsSource
from unspool.data.sources.parquet import ParquetSource
from unspool.data.sources.recall import RecallSource
from unspool.data.sources.repos import ReposSource
from unspool.data.sources.stack import StackSource
from unspool.data.sources.synthetic.fit_documents import SyntheticSource
from unspool.data.sources.text import TextSource
from unspool.data.sources.textbooks import TextbooksSource

SOURCES: dict[str, type[Source]] = {
    "text": TextSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "hf": HfSource,
    "repos": ReposSource,
    "stack": StackSource,
    "textbooks": TextbooksSource,
    "mds": MdsSource,
    "chat": ChatSource,
    "recall": RecallSource,
    "synthetic": SyntheticSource,
}

SourceClass = TypeVar("SourceClass", bound=Source)


def register_source(source: type[SourceClass]) -> type[SourceClass]:
    """Register a source kind for use in recipes; usable as a class decorator.

    Raises:
        ConfigError: `kind` is not a Literal with one name, or another class has that name.
    """
    register(SOURCES, tag_value(source, "kind"), source, kind="source kind")
    return source


_ANY_KIND = FromRegistry(SOURCES, "kind")
AnySource = Annotated[Source, _ANY_KIND]


def build_source(settings: Any) -> Source:
    """Build a source from its settings, including `kind`; pydantic's ValidationError if they are wrong."""
    source: Source = _ANY_KIND.adapter().validate_python(settings)
    return source


def source_for_file(path: Path, text: str | None = None) -> FileSource:
    """Choose the source for one file by its suffix; for JSON lines, by whether the first record is a conversation.

    `text` is the name of the text field; ConfigError if the kind has no fields.
    """
    name = path.name.lower()
    kinds = {end: kind for kind, source in SOURCES.items() for end in source.file_endings if name.endswith(end)}
    kind = kinds[max(kinds, key=len)]
    settings = {"kind": kind, "path": str(path)}
    if text is not None:
        if "text" not in SOURCES[kind].model_fields:
            raise ConfigError(f"{path.name} is read as kind: {kind}, which has no fields; remove the field {text}.")
        settings["text"] = text
    elif kind == "jsonl" and _starts_with_document(path, "chat") and not _starts_with_document(path, "jsonl"):
        settings["kind"] = "chat"
    source = build_source(settings)
    assert isinstance(source, FileSource)
    return source


def _starts_with_document(path: Path, kind: str) -> bool:
    source = build_source({"kind": kind, "path": str(path)})
    return isinstance(next(read_items(source, [path]), None), Document)
