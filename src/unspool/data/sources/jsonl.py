"""JSON lines, plain, .gz or .zst: one document per line that is not blank."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Item
from unspool.data.sources.config import JsonlSource
from unspool.data.sources.files import Unreadable, checked_text, chunks, decode, find_files, lines

T = TypeVar("T")

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def units(source: JsonlSource, root: Path) -> list[Path]:
    return find_files(source.path, root, kind="jsonl", endings=ENDINGS)


def read(source: JsonlSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        yield from records(path, partial(_document, path.name, source.text))


def _document(name: str, field: str, number: int, record: dict[str, object]) -> Document:
    return Document(f"{name}:{number}", checked_text(text_field(record, field)))


def records(path: Path, use: Callable[[int, dict[str, object]], T]) -> Iterator[T | Bad]:
    """For every line that is not blank what `use` makes of its number and its object, or why that cannot be."""
    number = 0
    try:
        for number, line in enumerate(lines(chunks(path), MAX_RECORD_BYTES), start=1):
            if line is not None and not line.strip():
                continue
            try:
                yield use(number, record_of(line))
            except Unreadable as error:
                yield Bad(str(path), f"line {number}", error.reason, error.detail)
    except Unreadable as error:
        yield Bad(str(path), f"after line {number}", error.reason, error.detail)


def record_of(line: bytes | None) -> dict[str, object]:
    """A line's JSON object; Unreadable if it is none."""
    if line is None:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one line")
    text = decode(line)
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable("broken_json", f"not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits, brackets nested thousands deep.
        raise Unreadable("broken_json", f"JSON that cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise Unreadable("not_an_object", f"a JSON object was expected, not {type(record).__name__}")
    return record


def text_field(record: dict[str, object], field: str) -> str:
    if field not in record:
        present = ", ".join(map(repr, list(record)[:12])) or "no fields"
        raise Unreadable("missing_field", f"no field {field!r}; it has {present}")
    text = record[field]
    if not isinstance(text, str):
        raise Unreadable("not_text", f"field {field!r} must be a string, not {type(text).__name__}")
    return text
