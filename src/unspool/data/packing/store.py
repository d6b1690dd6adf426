"""Arrow files of packed rows, written in batches and memory-mapped for reading.

Finding a row takes constant time; it is returned without a copy, and its arrays are read-only views of the file. A file
is renamed into place when it is complete.
"""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from unspool.core.errors import DataError
from unspool.data.packing.row import BATCH_TOKENS, Row

# Tokens per rows file; a file of this size is 1 GiB.
FILE_TOKENS = 1 << 28


class ArrowFile:
    """An Arrow IPC file under a temporary name, renamed when it is closed without error."""

    def __init__(self, path: Path, schema: Any) -> None:
        self._path = path
        self._aside = path.with_name(path.name + ".tmp")
        self._sink = pa.OSFile(str(self._aside), "wb")
        self._writer = pa.ipc.new_file(self._sink, schema)

    def write(self, batch: Any) -> None:
        self._writer.write_batch(batch)

    def finish(self) -> None:
        self._writer.close()
        self._sink.close()
        self._aside.replace(self._path)

    def abandon(self) -> None:
        self._sink.close()
        self._aside.unlink()


class RowWriter:
    """Write rows of one length to `rows-00000.arrow` …, like `CorpusWriter`.

    `masked`: every row has a loss mask. `pieced`: every row has `chunk_ids`. `placed`: every row has `positions`.
    """

    def __init__(self, folder: Path, *, row_len: int, masked: bool, pieced: bool = False, placed: bool = False) -> None:
        self._folder = folder
        self._row_len = row_len
        self._per_batch = max(1, BATCH_TOKENS // row_len)
        self._per_file = max(1, FILE_TOKENS // (row_len * self._per_batch))
        mask = pa.list_(pa.uint8(), row_len) if masked else pa.null()
        columns = [
            ("tokens", pa.list_(pa.uint32(), row_len)),
            ("doc_lens", pa.list_(pa.int32())),
            ("loss_mask", mask),
            ("source", pa.string()),
            ("attention", pa.string()),
            ("chunk_ids", pa.list_(pa.int32()) if pieced else pa.null()),
            ("positions", pa.list_(pa.int32(), row_len) if placed else pa.null()),
        ]
        # Equal batch sizes let a reader find row i by arithmetic.
        self._schema = pa.schema(columns, metadata={"rows_per_batch": str(self._per_batch)})
        self._rows: list[Row] = []
        self._file: ArrowFile | None = None
        self._files = 0
        self._batches = 0  # in the open file

    def append(self, row: Row) -> None:
        assert len(row.tokens) == self._row_len == row.doc_lens.sum()
        self._rows.append(row)
        if len(self._rows) == self._per_batch:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._file is None:
            self._file = ArrowFile(self._folder / f"rows-{self._files:05d}.arrow", self._schema)
            self._files += 1
        self._file.write(self._batch(rows))
        self._batches += 1
        if self._batches == self._per_file:
            self._file.finish()
            self._file, self._batches = None, 0

    def _batch(self, rows: list[Row]) -> Any:
        tokens = np.concatenate([row.tokens for row in rows])
        offsets = np.cumsum([0, *(len(row.doc_lens) for row in rows)], dtype=np.int32)
        missing = pa.nulls(len(rows))
        mask, chunk_ids, positions = missing, missing, missing
        if self._has("loss_mask"):
            masks = np.concatenate([row.loss_mask for row in rows if row.loss_mask is not None])
            mask = pa.FixedSizeListArray.from_arrays(pa.array(masks.view(np.uint8)), self._row_len)
        if self._has("chunk_ids"):
            docs = np.concatenate([row.chunk_ids for row in rows if row.chunk_ids is not None], dtype=np.int32)
            chunk_ids = pa.ListArray.from_arrays(pa.array(offsets), pa.array(docs))
        if self._has("positions"):
            places = np.concatenate([row.positions for row in rows if row.positions is not None], dtype=np.int32)
            positions = pa.FixedSizeListArray.from_arrays(pa.array(places), self._row_len)
        arrays = [
            pa.FixedSizeListArray.from_arrays(pa.array(tokens), self._row_len),
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([row.doc_lens for row in rows]))),
            mask,
            pa.array([row.source for row in rows], pa.string()),
            pa.array([row.attention for row in rows], pa.string()),
            chunk_ids,
            positions,
        ]
        return pa.record_batch(arrays, schema=self._schema)

    def _has(self, column: str) -> bool:
        return not pa.types.is_null(self._schema.field(column).type)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._flush()
            if self._file is not None:
                self._file.finish()
        elif self._file is not None:
            self._file.abandon()


class RowSet:
    """The rows of a folder: `len(rows)`, `rows[i]`, `rows.row_len`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [open_arrow(path) for path in paths]
        self._per_batch = int((self._files[0].schema.metadata or {})[b"rows_per_batch"])
        self.row_len: int = self._files[0].schema.field("tokens").type.list_size
        self._starts: list[int] = []
        self._len = 0
        for file in self._files:
            last = file.num_record_batches - 1
            self._starts.append(self._len)
            self._len += last * self._per_batch + file.get_batch(last).num_rows
        self._batches: dict[tuple[int, int], _RowBatch] = {}

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._len:
            raise IndexError(f"row {index} of {self._len}")
        file = bisect_right(self._starts, index) - 1
        number, inner = divmod(index - self._starts[file], self._per_batch)
        if (file, number) not in self._batches:
            self._batches[file, number] = _RowBatch(self._files[file].get_batch(number))
        return self._batches[file, number].row(inner)


class _RowBatch:
    """Views of one record batch of rows."""

    def __init__(self, batch: Any) -> None:
        tokens, lens, mask, source, attention, *more = batch.columns
        self._tokens = tokens.values.to_numpy().reshape(batch.num_rows, -1)
        self._ends = lens.offsets.to_numpy()
        self._lens = lens.values.to_numpy()
        self._mask = None
        if not pa.types.is_null(mask.type):
            self._mask = mask.values.to_numpy().view(np.bool_).reshape(batch.num_rows, -1)
        self._source = source.to_pylist()
        self._attention = attention.to_pylist()
        # Files from before these columns existed lack them.
        chunk_ids, positions = more or (pa.nulls(0), pa.nulls(0))
        self._piece_docs = None if pa.types.is_null(chunk_ids.type) else chunk_ids.values.to_numpy()
        self._positions = None
        if not pa.types.is_null(positions.type):
            self._positions = positions.values.to_numpy().reshape(batch.num_rows, -1)

    def row(self, inner: int) -> Row:
        pieces = slice(self._ends[inner], self._ends[inner + 1])
        return Row(
            tokens=self._tokens[inner],
            doc_lens=self._lens[pieces],
            loss_mask=None if self._mask is None else self._mask[inner],
            source=self._source[inner],
            attention=self._attention[inner],
            chunk_ids=None if self._piece_docs is None else self._piece_docs[pieces],
            positions=None if self._positions is None else self._positions[inner],
        )


def open_rows(folder: Path) -> RowSet:
    paths = sorted(folder.glob("rows-*.arrow"))
    if not paths:
        raise DataError(f"{folder}: no rows-*.arrow files; run `unspool pack` again.")
    return RowSet(paths)


def open_arrow(path: Path) -> Any:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except (OSError, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(
            f"{path}: not a complete Arrow file ({reason}); delete its folder and run the same command again."
        ) from error
