"""The Arrow files of corpora and rows: written in batches, read through a memory map.

In: token arrays. Out: `docs-00000.arrow` (id, tokens) and `rows-00000.arrow` (tokens, doc_lens,
loss_mask, source, attention) that any Arrow reader opens.
Promise: any document or row is found in constant time and handed out without a copy; a file is
renamed into place when complete. The arrays are views of the file and cannot be written to.
Elsewhere: manifests and folders (base/artefact.py), what is in a row (pack.py, tangle.py).
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa

from unspool.base.errors import DataError

# Tokens per record batch: what a writer holds in memory and a reader maps at a time.
BATCH_TOKENS = 1 << 20
# Tokens per rows file; a file of this size is 1 GiB.
FILE_TOKENS = 1 << 28

_DOCS = pa.schema([("id", pa.string()), ("tokens", pa.large_list(pa.uint32()))])


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence. `loss_mask` is over target tokens (labels.py); None means all of them."""

    tokens: np.ndarray  # uint32[L]
    doc_lens: np.ndarray  # int32[k], sums to L
    loss_mask: np.ndarray | None  # bool[L]
    source: str  # the sources it holds, joined by "+"
    attention: str  # "documents" | "full"
    piece_docs: np.ndarray | None = None  # int32[k]: pieces of one document share its number; None: all are different
    positions: np.ndarray | None = None  # int32[L]; None: 0, 1, 2 … in what attends to itself


class _ArrowFile:
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


class CorpusWriter:
    """Writes the documents of one shard: `with CorpusWriter(path) as writer: writer.append(id, tokens)`."""

    def __init__(self, path: Path) -> None:
        self._file = _ArrowFile(path, _DOCS)
        self._ids: list[str] = []
        self._docs: list[np.ndarray] = []
        self._held = 0

    def append(self, doc_id: str, tokens: np.ndarray) -> None:
        self._ids.append(doc_id)
        self._docs.append(tokens)
        self._held += len(tokens)
        if self._held >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._docs:
            return
        offsets = np.cumsum([0, *map(len, self._docs)], dtype=np.int64)
        tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(self._docs)))
        self._file.write(pa.record_batch([pa.array(self._ids, pa.string()), tokens], schema=_DOCS))
        self._ids, self._docs, self._held = [], [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._file.abandon()
            return
        self._flush()
        self._file.finish()


class StoredTokens:
    """A document's tokens, read when sliced and not mapped: `len(tokens)`, `tokens[start:stop]`."""

    __slots__ = ("_file", "_len", "_offset")

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._len = file, offset, length

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(self._len)
        data = os.pread(self._file.fileno(), 4 * (stop - start), self._offset + 4 * start)
        return np.frombuffer(data, dtype=np.uint32)


class CorpusReader:
    """The documents of some corpus files, in order: `len`, `reader[i]`, iteration, `lens`, `id(i)`, `stored(i)`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: list[BinaryIO] = []  # opened when a document is first asked for as stored
        self._first_docs: list[int] = []  # of each file
        self._byte_starts = np.zeros(0, dtype=np.int64)  # where in its file each document's tokens begin
        self._starts: list[int] = []
        self._batches: list[tuple[np.ndarray, np.ndarray, Any]] = []
        lens: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        count = 0
        for path in paths:
            file = _open(path)
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                offsets = batch.column("tokens").offsets.to_numpy()
                self._starts.append(count)
                self._batches.append((offsets, batch.column("tokens").values.to_numpy(), batch.column("id")))
                lens.append(np.diff(offsets))
                count += batch.num_rows
        self.lens = np.concatenate(lens)  # tokens of each document

    @property
    def num_tokens(self) -> int:
        return int(self.lens.sum())

    def __len__(self) -> int:
        return len(self.lens)

    def __getitem__(self, index: int) -> np.ndarray:
        (offsets, tokens, _), inner = self._find(index)
        return tokens[offsets[inner] : offsets[inner + 1]]

    def stored(self, index: int) -> StoredTokens:
        """The same as `reader[index]`, for reading a whole corpus in random order.

        A page that is mapped counts as this process's memory, and the kernel maps a megabyte and more around
        each access, so that random access soon counts the whole corpus.
        """
        if not self._files:
            self._locate()
        file = self._files[bisect_right(self._first_docs, index) - 1]
        return StoredTokens(file, int(self._byte_starts[index]), int(self.lens[index]))

    def _locate(self) -> None:
        starts: list[np.ndarray] = []
        batch_numbers = iter(range(len(self._batches)))
        for path in self._paths:
            self._files.append(path.open("rb", buffering=0))
            self._first_docs.append(sum(map(len, starts)))
            for begin, number in zip(_token_places(path), batch_numbers, strict=False):
                starts.append(begin + 4 * self._batches[number][0][:-1])
        self._byte_starts = np.concatenate(starts)

    def id(self, index: int) -> str:
        (_, _, ids), inner = self._find(index)
        return str(ids[inner])

    def __iter__(self) -> Iterator[np.ndarray]:
        for offsets, tokens, _ in self._batches:
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
                yield tokens[start:stop]

    def _find(self, index: int) -> tuple[tuple[np.ndarray, np.ndarray, Any], int]:
        if not 0 <= index < len(self.lens):
            raise IndexError(f"document {index} of {len(self.lens)}")
        number = bisect_right(self._starts, index) - 1
        return self._batches[number], index - self._starts[number]


def _token_places(path: Path) -> list[int]:
    """Where in a corpus file the tokens of each batch begin, in bytes."""
    mapped = pa.memory_map(str(path))
    base = mapped.read_buffer(1).address
    mapped.seek(0)
    arrow = pa.ipc.open_file(mapped)
    columns = [arrow.get_batch(number).column("tokens").values for number in range(arrow.num_record_batches)]
    return [values.buffers()[1].address - base + 4 * values.offset for values in columns]


def open_corpus(folder: Path) -> CorpusReader:
    return CorpusReader(sorted(folder.glob("docs-*.arrow")))


def keep_first(path: Path, count: int) -> None:
    """Shorten a corpus file to its first `count` documents; nothing happens if it has no more."""
    reader = CorpusReader([path])
    if count >= len(reader):
        return
    with CorpusWriter(path) as writer:
        for index in range(count):
            writer.append(reader.id(index), reader[index])


class RowWriter:
    """Writes rows of one length into `rows-00000.arrow` …, like `CorpusWriter`.

    Masked: every row has a loss mask. Pieced: every row has `piece_docs`. Placed: every row has `positions`.
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
            ("piece_docs", pa.list_(pa.int32()) if pieced else pa.null()),
            ("positions", pa.list_(pa.int32(), row_len) if placed else pa.null()),
        ]
        # The size of the batches lets a reader find row i by arithmetic.
        self._schema = pa.schema(columns, metadata={"rows_per_batch": str(self._per_batch)})
        self._rows: list[Row] = []
        self._file: _ArrowFile | None = None
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
            self._file = _ArrowFile(self._folder / f"rows-{self._files:05d}.arrow", self._schema)
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
        mask, piece_docs, positions = missing, missing, missing
        if self._has("loss_mask"):
            masks = np.concatenate([row.loss_mask for row in rows if row.loss_mask is not None])
            mask = pa.FixedSizeListArray.from_arrays(pa.array(masks.view(np.uint8)), self._row_len)
        if self._has("piece_docs"):
            docs = np.concatenate([row.piece_docs for row in rows if row.piece_docs is not None], dtype=np.int32)
            piece_docs = pa.ListArray.from_arrays(pa.array(offsets), pa.array(docs))
        if self._has("positions"):
            places = np.concatenate([row.positions for row in rows if row.positions is not None], dtype=np.int32)
            positions = pa.FixedSizeListArray.from_arrays(pa.array(places), self._row_len)
        arrays = [
            pa.FixedSizeListArray.from_arrays(pa.array(tokens), self._row_len),
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([row.doc_lens for row in rows]))),
            mask,
            pa.array([row.source for row in rows], pa.string()),
            pa.array([row.attention for row in rows], pa.string()),
            piece_docs,
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
        self._files = [_open(path) for path in paths]
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
        # Rows written before these columns existed lack them.
        piece_docs, positions = more or (pa.nulls(0), pa.nulls(0))
        self._piece_docs = None if pa.types.is_null(piece_docs.type) else piece_docs.values.to_numpy()
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
            piece_docs=None if self._piece_docs is None else self._piece_docs[pieces],
            positions=None if self._positions is None else self._positions[inner],
        )


def open_rows(folder: Path) -> RowSet:
    paths = sorted(folder.glob("rows-*.arrow"))
    if not paths:
        raise DataError(f"{folder}: no rows-*.arrow files; build the rows again.")
    return RowSet(paths)


def _open(path: Path) -> Any:
    try:
        return pa.ipc.open_file(pa.memory_map(str(path)))
    except (OSError, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path}: not a complete Arrow file ({reason}); delete its folder and run again.") from error
