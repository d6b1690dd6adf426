"""Conversations in JSON lines or Parquet files: one document, not yet written out, per record."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from unspool.data.documents import Bad, Document, Item
from unspool.data.readers import jsonl
from unspool.data.readers.chat_shapes import FIELDS, SYSTEM_FIELD, conversation_of
from unspool.data.readers.files import Unreadable, find_files
from unspool.data.readers.parquet import Plan, read_file
from unspool.data.sources import ChatSource

PARQUET = ".parquet"


def units(source: ChatSource, root: Path) -> list[Path]:
    return find_files(source.path, root, kind="chat", endings=(*jsonl.ENDINGS, PARQUET))


def read(source: ChatSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        if path.suffix == PARQUET:
            yield from read_file(path, partial(_plan, path, source.messages))
        else:
            yield from jsonl.records(path, partial(_document, path.name, source.messages))


def _document(name: str, field: str | None, number: int, record: dict[str, Any]) -> Document:
    return Document(f"{name}:{number}", "", messages=conversation_of(record, field))


def _plan(path: Path, field: str | None, schema: pa.Schema) -> Plan:
    """The columns to read, and how their records become items."""
    wanted = [field] if field is not None else list(FIELDS)
    columns = [name for name in wanted if name in schema.names]
    if not columns:
        present = ", ".join(map(repr, schema.names[:12])) or "no columns"
        raise Unreadable("missing_field", f"no column {' or '.join(map(repr, wanted))}; it has {present}")
    if SYSTEM_FIELD in schema.names:
        columns.append(SYSTEM_FIELD)
    return columns, partial(_items, path, field)


def _items(path: Path, field: str | None, batch: pa.RecordBatch, number: int) -> Iterator[Item]:
    for offset in range(batch.num_rows):
        record = number + offset
        try:
            # One by one: Arrow takes strings from files unchecked, and one that is not UTF-8 must not cost the others.
            (values,) = batch.slice(offset, 1).to_pylist()
            yield _document(path.name, field, record, values)
        except Unreadable as error:
            yield Bad(str(path), f"record {record}", error.reason, error.detail)
        except UnicodeDecodeError as error:
            yield Bad(str(path), f"record {record}", "invalid_utf8", f"not valid UTF-8 at byte {error.start}")
