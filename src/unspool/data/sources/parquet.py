"""Parquet files: one document per record of one column.

In: Parquet files. Out: one item per record, in file order; `items_of` does the same for any Arrow array.
Promise: a damaged row group costs the records after the damage in that row group, counted as one quarantined
record that says how many they were; numbering goes on as if they had been read.
Price: Arrow holds a page whole, also one with a record that is too long, and writers put up to 1024 records in
one: memory grows to about three times the texts of a row group where they are long.
Elsewhere: Arrow files and datasets (hf.py).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Filtered, Item
from unspool.data.sources.config import ParquetSource
from unspool.data.sources.files import Unreadable, checked_text, decode, find_files, first_line

_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 1024
_READ_AHEAD = 1 << 20  # without it Arrow loads a whole column of a row group at once
_MAGIC = b"PAR1"
_TEXT = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
# What Arrow raises on damaged files; KeyError and TypeError come from its own wrapping of broken schemas.
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError)


# Which columns of a file are read, and the items of a batch of them, whose first record has the number given.
Plan = tuple[list[str], Callable[[pa.RecordBatch, int], Iterator[Item]]]


def units(source: ParquetSource, root: Path) -> list[Path]:
    return find_files(source.path, root, kind="parquet", endings=(".parquet",))


def read(source: ParquetSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        yield from read_file(path, partial(_text_plan, path, source.text))


def _text_plan(path: Path, column: str, schema: pa.Schema) -> Plan:
    parts = column_path(schema, column)
    return [".".join(parts)], lambda batch, number: items_of(column_of(batch, parts), path, number)


def column_path(schema: pa.Schema, name: str) -> list[str]:
    """Where a column lies: its name, or for "a.b" the field b of the struct a; Unreadable if it holds no text."""
    for parts in ([name], name.split(".")):
        kind = _type_at(schema, parts)
        if kind is not None:
            if not _holds_text(kind):
                raise Unreadable("not_text", f"column {name!r} must hold strings, not {kind}")
            return parts
    present = ", ".join(map(repr, schema.names[:12])) or "no columns"
    raise Unreadable("missing_field", f"no column {name!r}; it has {present}")


def _type_at(schema: pa.Schema, parts: list[str]) -> pa.DataType | None:
    if parts[0] not in schema.names:
        return None
    kind = schema.field(schema.names.index(parts[0])).type
    for part in parts[1:]:
        index = kind.get_field_index(part) if pa.types.is_struct(kind) else -1
        if index < 0:
            return None
        kind = kind.field(index).type
    return kind


def _holds_text(kind: pa.DataType) -> bool:
    return (kind.value_type if pa.types.is_dictionary(kind) else kind) in _TEXT


def column_of(batch: pa.RecordBatch, parts: list[str]) -> pa.Array:
    """The column at a path that `column_path` gave."""
    array = batch.column(batch.schema.names.index(parts[0]))
    return pc.struct_field(array, parts[1:]) if parts[1:] else array


def items_of(array: pa.Array, path: Path, number: int) -> Iterator[Item]:
    """One item per element; the first is record `number`."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # As bytes, since Arrow takes strings from files without checking that they are UTF-8.
    for offset, value in enumerate(array.cast(pa.large_binary())):
        record = number + offset
        try:
            text = _text(value)
        except Unreadable as error:
            yield Bad(str(path), f"record {record}", error.reason, error.detail)
        else:
            yield Document(f"{path.name}:{record}", text) if text else Filtered(f"{path.name}:{record}", "empty")


def _text(value: Any) -> str:
    data = value.as_buffer()  # no copy yet
    if data is None:
        raise Unreadable("not_text", "null instead of a string")
    if data.size > MAX_RECORD_BYTES:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one record")
    return checked_text(decode(data.to_pybytes()))


def read_file(path: Path, plan: Callable[[pa.Schema], Plan]) -> Iterator[Item]:
    """One item per record; `plan` says of a file's schema what is read, or raises Unreadable."""
    try:
        yield from _read_groups(path, plan)
    except Unreadable as error:
        yield Bad(str(path), "whole file", error.reason, error.detail)


def _read_groups(path: Path, plan: Callable[[pa.Schema], Plan]) -> Iterator[Item]:
    with _opened(path) as file:
        try:
            planned = plan(file.schema_arrow)
            sizes = [_row_group_size(file, group) for group in range(file.num_row_groups)]
        except ARROW_ERRORS as error:
            raise Unreadable("unreadable", f"its description of itself is damaged ({first_line(error)})") from error
        number = 1
        for group, (num_records, num_bytes) in enumerate(sizes):
            batch_size = min(max(_BATCH_BYTES * num_records // max(num_bytes, 1), 1), _BATCH_RECORDS)
            yield from _read_row_group(path, file, group, planned, batch_size, number, num_records)
            number += num_records


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_READ_AHEAD, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise Unreadable("unreadable", "the file has gone") from error
    except ARROW_ERRORS as error:
        with path.open("rb") as file:
            begins = file.read(len(_MAGIC)) == _MAGIC
            file.seek(max(path.stat().st_size - len(_MAGIC), 0))
            ends = file.read() == _MAGIC
        if begins and not ends:
            raise Unreadable("truncated", "cut short; a Parquet file ends with its description") from error
        raise Unreadable("unreadable", f"cannot be read as Parquet ({first_line(error)})") from error


def _row_group_size(file: pq.ParquetFile, group: int) -> tuple[int, int]:
    """How many records a row group holds, and how many bytes they take uncompressed, with their other columns.

    One column's bytes would be nearer, but asking a damaged file for them ends the process: pyarrow does not
    catch what the library beneath it throws there.
    """
    described = file.metadata.row_group(group)
    if described.num_rows < 0:
        raise ValueError(f"a row group of {described.num_rows} records")
    return described.num_rows, described.total_byte_size


def _read_row_group(
    path: Path, file: pq.ParquetFile, group: int, planned: Plan, batch_size: int, number: int, num_records: int
) -> Iterator[Item]:
    columns, items = planned
    end = number + num_records
    problem = None
    try:
        batches = file.iter_batches(batch_size, row_groups=[group], columns=columns, use_threads=False)
        for batch in batches:
            if batch.num_rows > end - number:
                problem = "more records than the file says"
                break
            yield from items(batch, number)
            number += batch.num_rows
    except ARROW_ERRORS as error:
        problem = first_line(error)
    if problem is None and number < end:
        problem = "fewer records than the file says"
    if problem is not None:
        detail = f"row group {group + 1} is damaged ({problem}); {end - number} records are lost"
        yield Bad(str(path), f"after record {number - 1}", "corrupt_page", detail)
