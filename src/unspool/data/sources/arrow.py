"""Read records of Parquet and Arrow files.

A damaged row group or batch costs the records after the damage in it. They count as one `Bad` record with the number of
lost records, and numbering continues as if they had been read.

Arrow loads a whole page, even one with a record that is too long, and writers put up to 1024 records in a page. With
long texts, memory therefore grows to about three times the text of a row group.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Filtered, Item
from unspool.data.sources.files import Unreadable, checked_text, damaged, decode, first_line, list_names

_BATCH_BYTES = 8 << 20
_BATCH_RECORDS = 1024
_BUFFER_BYTES = 1 << 20  # without a buffer, Arrow loads a whole column of a row group at once
_MAGIC = b"PAR1"
_TEXT = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
# Exceptions of Arrow on damaged files; KeyError and TypeError come from its Python layer on broken schemas.
ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError)

T = TypeVar("T")
# The columns to read from a file, and a function that yields the items of a batch, given the number of its first
# record.
Columns = tuple[list[str], Callable[[pa.RecordBatch, int], Iterator[T]]]


def read_text_column(
    path: Path,
    column: str,
    open_file: Callable[[Path], pq.ParquetFile] | None = None,
    groups: range | None = None,
) -> Iterator[Item]:
    """Yield one item per record of a Parquet file's column, of all row groups or of some."""

    def choose_columns(schema: pa.Schema) -> Columns[Item]:
        parts = column_path(schema, column)
        return [".".join(parts)], lambda batch, number: text_items(nested_column(batch, parts), path, number)

    return read_parquet(path, choose_columns, open_file, groups)


def column_path(schema: pa.Schema, name: str) -> list[str]:
    """Find a text column by name, or field b of struct a for "a.b"; Unreadable if it does not exist."""
    for parts in ([name], name.split(".")):
        kind = _type_at(schema, parts)
        if kind is not None:
            if (kind.value_type if pa.types.is_dictionary(kind) else kind) not in _TEXT:
                raise Unreadable("not_text", f"column {name!r} must hold strings, not {kind}")
            return parts
    raise Unreadable("missing_field", f"no column {name!r}; it has {list_names(schema.names, 'no columns')}")


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


def nested_column(batch: pa.RecordBatch, parts: list[str]) -> pa.Array:
    """Return the column at a path from `column_path`."""
    array = batch.column(batch.schema.names.index(parts[0]))
    return pc.struct_field(array, parts[1:]) if parts[1:] else array


def text_items(array: pa.Array, path: Path, number: int) -> Iterator[Item]:
    """Yield one item per element; the first element is record `number`."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # As bytes, because Arrow does not check that strings in files are UTF-8.
    for record, value in enumerate(array.cast(pa.large_binary()), start=number):
        try:
            text = _decode_value(value)
        except Unreadable as error:
            yield Bad(str(path), f"record {record}", error.reason, error.detail)
        else:
            yield Document(f"{path.name}:{record}", text) if text else Filtered(f"{path.name}:{record}", "empty")


def _decode_value(value: Any) -> str:
    data = value.as_buffer()  # no copy yet
    if data is None:
        raise Unreadable("not_text", "null instead of a string")
    if data.size > MAX_RECORD_BYTES:
        raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB in one record")
    return checked_text(decode(data.to_pybytes()))


# Parquet files


def read_parquet(
    path: Path,
    choose_columns: Callable[[pa.Schema], Columns[T]],
    open_file: Callable[[Path], pq.ParquetFile] | None = None,
    groups: range | None = None,
) -> Iterator[T | Bad]:
    """Yield one item per record; `choose_columns` selects columns from a file's schema, or raises Unreadable."""
    try:
        with (open_file or open_parquet)(path) as file:
            yield from _read_row_groups(file, path, choose_columns, groups)
    except Unreadable as error:
        yield Bad(str(path), "whole file", error.reason, error.detail)


def _read_row_groups(
    file: pq.ParquetFile, path: Path, choose_columns: Callable[[pa.Schema], Columns[T]], groups: range | None
) -> Iterator[T | Bad]:
    try:
        columns = choose_columns(file.schema_arrow)
        sizes = [_row_group_size(file, group) for group in range(file.num_row_groups)]
    except ARROW_ERRORS as error:
        raise Unreadable("unreadable", f"its metadata is damaged ({first_line(error)})") from error
    number = 1
    for group, (num_records, num_bytes) in enumerate(sizes):
        if groups is None or group in groups:
            batch_size = min(max(_BATCH_BYTES * num_records // max(num_bytes, 1), 1), _BATCH_RECORDS)
            batches = partial(file.iter_batches, batch_size, row_groups=[group], use_threads=False)
            yield from _read_row_group(path, group, columns, batches, number, num_records)
        number += num_records


def open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, page_checksum_verification=True)
    except ARROW_ERRORS as error:
        unreadable = damaged(error, path, "cannot be read as Parquet ({})")
        with path.open("rb") as file:
            has_start = file.read(len(_MAGIC)) == _MAGIC
            file.seek(max(path.stat().st_size - len(_MAGIC), 0))
            has_end = file.read() == _MAGIC
        if has_start and not has_end:
            raise Unreadable("truncated", "truncated; the metadata at the end of a Parquet file is missing") from error
        raise unreadable from error


def _row_group_size(file: pq.ParquetFile, group: int) -> tuple[int, int]:
    """Return the number of records of a row group, and their uncompressed bytes in all columns.

    The bytes of one column would be more exact, but reading them from a damaged file crashes the process: pyarrow does
    not catch the C++ exception.
    """
    metadata = file.metadata.row_group(group)
    if metadata.num_rows < 0:
        raise ValueError(f"a row group of {metadata.num_rows} records")
    return metadata.num_rows, metadata.total_byte_size


def _read_row_group(
    path: Path,
    group: int,
    columns: Columns[T],
    read_batches: Callable[..., Iterator[pa.RecordBatch]],
    number: int,
    num_records: int,
) -> Iterator[T | Bad]:
    names, items = columns
    end = number + num_records
    problem = None
    try:
        for batch in read_batches(columns=names):
            if batch.num_rows > end - number:
                problem = "more records than in the metadata"
                break
            yield from items(batch, number)
            number += batch.num_rows
    except ARROW_ERRORS as error:
        problem = damaged(error, path).detail
    if problem is None and number < end:
        problem = "fewer records than in the metadata"
    if problem is not None:
        detail = f"row group {group + 1} is damaged ({problem}); {end - number} records are lost"
        yield Bad(str(path), f"after record {number - 1}", "corrupt_page", detail)


# Arrow files, as `datasets.save_to_disk` writes them


def read_arrow(path: Path, column: str) -> Iterator[Item]:
    """Yield one item per record of an Arrow file's column."""
    number = 1
    try:
        with pa.memory_map(str(path)) as file:
            for batch, parts in _arrow_batches(file, column):
                try:
                    # Arrow does not check the offsets in a file; full validation ensures that they stay inside the
                    # file.
                    batch.validate()
                    array = _validated_bytes(nested_column(batch, parts))
                except ARROW_ERRORS as error:
                    detail = f"a batch is damaged ({first_line(error)}); {batch.num_rows} records are lost"
                    yield Bad(str(path), f"after record {number - 1}", "corrupt_page", detail)
                else:
                    for start in range(0, len(array), _BATCH_RECORDS):
                        yield from text_items(array.slice(start, _BATCH_RECORDS), path, number + start)
                number += batch.num_rows
    except (Unreadable, *ARROW_ERRORS) as error:
        at = f"after record {number - 1}" if number > 1 else "whole file"
        if isinstance(error, Unreadable):
            yield Bad(str(path), at, error.reason, error.detail)
        else:
            unreadable = damaged(error, path, "cannot be read as Arrow ({})")
            yield Bad(str(path), at, unreadable.reason, unreadable.detail)


def _arrow_batches(file: pa.MemoryMappedFile, column: str) -> Iterator[tuple[pa.RecordBatch, list[str]]]:
    start = file.read(6)
    file.seek(max(file.size() - 8, 0))
    end = file.read(8)
    file.seek(0)
    if start == b"ARROW1":
        reader = pa.ipc.open_file(file)
        parts = column_path(reader.schema, column)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index), parts
        return
    # A stream truncated between two batches looks like a shorter stream, except for the end mark.
    is_whole = end == b"\xff\xff\xff\xff\0\0\0\0" or (
        not start.startswith(b"\xff\xff\xff\xff") and end.endswith(b"\0" * 4)
    )
    try:
        reader = pa.ipc.open_stream(file)
        parts = column_path(reader.schema, column)
        for batch in reader:
            yield batch, parts
    except ARROW_ERRORS as error:
        reason = "unreadable" if is_whole else "truncated"
        raise Unreadable(reason, f"cannot be read further as an Arrow stream ({first_line(error)})") from error
    if not is_whole:
        raise Unreadable("truncated", "truncated; the end mark of an Arrow stream is missing")
    if file.tell() < file.size():
        raise Unreadable("corrupt_page", f"an end mark at byte {file.tell()} of {file.size()}; the rest is lost")


def _validated_bytes(array: pa.Array) -> pa.Array:
    """Return the column as bytes, fully validated; as strings, one invalid UTF-8 value would fail the whole batch."""
    if pa.types.is_dictionary(array.type):
        array.indices.validate(full=True)
        return pa.DictionaryArray.from_arrays(array.indices, _validated_bytes(array.dictionary))
    kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    array = array.view(kinds.get(array.type, array.type))
    array.validate(full=True)
    return array
