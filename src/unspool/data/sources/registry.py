"""All source kinds by name, and the type of a recipe's `sources` entries."""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args

from pydantic import Field, GetJsonSchemaHandler, PlainValidator, SerializeAsAny, TypeAdapter
from pydantic_core import CoreSchema

from unspool.core.errors import ConfigError
from unspool.data.sources.base import Document, FileSource, Source, read_items
from unspool.data.sources.chat import ChatSource
from unspool.data.sources.hub import HfSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.mds import MdsSource
from unspool.data.sources.parquet import ParquetSource
from unspool.data.sources.recall import RecallSource
from unspool.data.sources.repos import ReposSource
from unspool.data.sources.synthetic.generate import SyntheticSource
from unspool.data.sources.text import TextSource
from unspool.data.sources.textbooks import TextbooksSource

SOURCES: dict[str, type[Source]] = {
    "text": TextSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "hf": HfSource,
    "repos": ReposSource,
    "textbooks": TextbooksSource,
    "mds": MdsSource,
    "chat": ChatSource,
    "recall": RecallSource,
    "synthetic": SyntheticSource,
}

SourceClass = TypeVar("SourceClass", bound=Source)


def register_source(source: type[SourceClass]) -> type[SourceClass]:
    """Add a source kind, so that recipes may name it; usable as a class decorator.

    Raises:
        ConfigError: `kind` is not a Literal with one name, or another class has that name.
    """
    names = get_args(source.model_fields["kind"].annotation)
    if len(names) != 1:
        raise ConfigError(f"{source.__name__}.kind must be a Literal with one name, such as Literal['csv'].")
    if SOURCES.setdefault(names[0], source) is not source:
        raise ConfigError(f"source kind {names[0]!r} already names {SOURCES[names[0]].__name__}; use another name.")
    return source


@cache
def _adapter(classes: tuple[type[Source], ...]) -> TypeAdapter[Source]:
    kinds: Any = Annotated[Union[classes], Field(discriminator="kind")]  # noqa: UP007
    return TypeAdapter(kinds)


def build_source(settings: Any) -> Source:
    """Check the settings of a source, `kind` included; pydantic's ValidationError if they are wrong."""
    return _adapter(tuple(SOURCES.values())).validate_python(settings)


class _AllKinds:
    """Makes the JSON schema list the kinds that are registered when it is asked for."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(_adapter(tuple(SOURCES.values())).core_schema)


# Not a Union, which would be fixed when the recipe's class is built, before others can register their kinds.
AnySource = Annotated[SerializeAsAny[Source], PlainValidator(build_source), _AllKinds()]


def source_for_file(path: Path, text: str | None = None) -> FileSource:
    """Choose the source that reads one file: by its ending, and for JSON lines by whether a conversation comes first.

    `text` names the field that holds the text; ConfigError if the kind has no fields.
    """
    name = path.name.lower()
    kinds = {end: kind for kind, source in SOURCES.items() for end in source.file_endings if name.endswith(end)}
    kind = kinds[max(kinds, key=len)]
    settings = {"kind": kind, "path": str(path)}
    if text is not None:
        if "text" not in SOURCES[kind].model_fields:
            raise ConfigError(f"{path.name} is read as kind: {kind}, which has no fields; leave out the field {text}.")
        settings["text"] = text
    elif kind == "jsonl" and _starts_with_document(path, "chat") and not _starts_with_document(path, "jsonl"):
        settings["kind"] = "chat"
    source = build_source(settings)
    assert isinstance(source, FileSource)
    return source


def _starts_with_document(path: Path, kind: str) -> bool:
    source = build_source({"kind": kind, "path": str(path)})
    return isinstance(next(read_items(source, [path]), None), Document)
