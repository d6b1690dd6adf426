"""Source kind `jsonl`: JSON lines, plain, .gz or .zst, one document per non-blank line."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, FileSource, Item, TextFileSource
from unspool.data.sources.files import Unreadable, checked_text, chunks, decode, lines, list_names
from unspool.data.sources.text import TextSource

T = TypeVar("T")

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")


class JsonlSource(TextFileSource):
    """JSON lines (plain, .gz or .zst); one document per line."""

    kind: Literal["jsonl"]
    text: str = Field("text", description="Field that holds the text.")

    endings: ClassVar[tuple[str, ...]] = ENDINGS
    file_endings: ClassVar[tuple[str, ...]] = ENDINGS

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        for path in units:
            yield from read_jsonl(path, partial(self._document, path.name))

    def _document(self, name: str, number: int, record: dict[str, object]) -> Document:
        return Document(f"{name}:{number}", checked_text(text_field(record, self.text)))


def text_or_jsonl(path: str) -> FileSource:
    """Choose the source for a path that may hold JSON lines or plain text."""
    if ".jsonl" in Path(path).name:
        return JsonlSource(kind="jsonl", path=path)
    return TextSource(kind="text", path=path)


def read_jsonl(path: Path, use: Callable[[int, dict[str, object]], T]) -> Iterator[T | Bad]:
    """Yield `use(line number, object)` for every non-blank line, or a `Bad` with the reason."""
    number = 0
    try:
        for number, line in enumerate(lines(chunks(path), MAX_RECORD_BYTES), start=1):
            if line is not None and not line.strip():
                continue
            try:
                yield use(number, parse_record(line))
            except Unreadable as error:
                yield Bad(str(path), f"line {number}", error.reason, error.detail)
    except Unreadable as error:
        yield Bad(str(path), f"after line {number}", error.reason, error.detail)


def parse_record(line: bytes | None) -> dict[str, object]:
    """Parse a line's JSON object; Unreadable if it is not one."""
    if line is None:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one line")
    text = decode(line)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable("broken_json", f"not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits, or brackets nested thousands deep.
        raise Unreadable("broken_json", f"JSON that cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise Unreadable("not_an_object", f"expected a JSON object, not {type(record).__name__}")
    return record


def text_field(record: dict[str, object], field: str) -> str:
    """Return the text in a field; Unreadable if the field is missing or not a string."""
    if field not in record:
        raise Unreadable("missing_field", f"no field {field!r}; it has {list_names(record, 'no fields')}")
    text = record[field]
    if not isinstance(text, str):
        raise Unreadable("not_text", f"field {field!r} must be a string, not {type(text).__name__}")
    return text
