"""Arrow files of a corpus, written in batches and memory-mapped for reading.

Files `docs-00000.arrow` … have the columns id, tokens and, if the source has them, loss_mask or gzip_ratio. Any Arrow
reader opens them. Finding a document takes constant time; it is returned without a copy, as a read-only view of the
file. A file is renamed into place when it is complete.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import pyarrow as pa

from unspool.data.packing.row import BATCH_TOKENS
from unspool.data.packing.store import ArrowFile, open_arrow

_DOCS = pa.schema([("id", pa.string()), ("tokens", pa.large_list(pa.uint32()))])
# A byte per token: 1 if it is trained on. Without the column, all tokens are trained on.
_MASK = pa.field("loss_mask", pa.large_list(pa.uint8()))
# Of documents that were chosen by it (gzip_ratio.py).
_RATIO = pa.field("gzip_ratio", pa.float64())


class CorpusWriter:
    """Write the documents of one shard: `with CorpusWriter(path) as writer: writer.append(id, tokens)`.

    If `masked`, every document needs a loss mask; if `measured`, its gzip ratio.
    """

    def __init__(self, path: Path, *, masked: bool = False, measured: bool = False) -> None:
        self._masked, self._measured = masked, measured
        self._schema = pa.schema([*_DOCS, *([_MASK] if masked else []), *([_RATIO] if measured else [])])
        self._file = ArrowFile(path, self._schema)
        self._ids: list[str] = []
        self._docs: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._ratios: list[float] = []
        self._held = 0

    def append(
        self,
        doc_id: str,
        tokens: np.ndarray,
        loss_mask: np.ndarray | None = None,
        *,
        gzip_ratio: float | None = None,
    ) -> None:
        assert (loss_mask is not None) == self._masked
        assert (gzip_ratio is not None) == self._measured
        self._ids.append(doc_id)
        self._docs.append(tokens)
        if gzip_ratio is not None:
            self._ratios.append(gzip_ratio)
        if loss_mask is not None:
            assert len(loss_mask) == len(tokens)
            self._masks.append(loss_mask.astype(np.bool_))
        self._held += len(tokens)
        if self._held >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._docs:
            return
        offsets = pa.array(np.cumsum([0, *map(len, self._docs)], dtype=np.int64))
        columns = [pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(self._docs)))]
        if self._masks:
            columns.append(pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(self._masks).view(np.uint8))))
        if self._ratios:
            columns.append(pa.array(self._ratios, pa.float64()))
        self._file.write(pa.record_batch([pa.array(self._ids, pa.string()), *columns], schema=self._schema))
        self._ids, self._docs, self._masks, self._ratios, self._held = [], [], [], [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._file.abandon()
            return
        self._flush()
        self._file.finish()


class StoredTokens:
    """A document's tokens or loss mask, read from the file on slicing: `len(tokens)`, `tokens[start:stop]`."""

    __slots__ = ("_dtype", "_file", "_len", "_offset")

    def __init__(self, file: BinaryIO, offset: int, length: int, dtype: Any = np.uint32) -> None:
        self._file, self._offset, self._len, self._dtype = file, offset, length, np.dtype(dtype)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(self._len)
        size = self._dtype.itemsize
        data = os.pread(self._file.fileno(), size * (stop - start), self._offset + size * start)
        return np.frombuffer(data, dtype=self._dtype)


class _Batch(NamedTuple):
    """Views of one record batch of documents."""

    offsets: np.ndarray
    tokens: np.ndarray
    masks: np.ndarray | None  # bool
    ratios: np.ndarray | None  # float64, of each document
    ids: Any


class CorpusReader:
    """The documents of some corpus files, in order: `len`, `reader[i]`, iteration, `lens`, `id(i)`, `stored(i)`.

    `loss_mask(i)` and `stored_mask(i)` are None if the whole document is trained on.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: list[BinaryIO] = []  # opened on the first call of `stored`
        self._first_docs: list[int] = []  # of each file
        # The byte at which each document's tokens and mask begin in its file.
        self._token_starts = self._mask_starts = np.zeros(0, dtype=np.int64)
        self._starts: list[int] = []
        self._batches: list[_Batch] = []
        lens: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        count = 0
        for path in paths:
            file = open_arrow(path)
            for number in range(file.num_record_batches):
                batch = _view_batch(file.get_batch(number))
                self._starts.append(count)
                self._batches.append(batch)
                lens.append(np.diff(batch.offsets))
                count += len(lens[-1])
        self.lens = np.concatenate(lens)  # tokens of each document

    @property
    def num_tokens(self) -> int:
        return int(self.lens.sum())

    @property
    def num_trained(self) -> int:
        """Number of trained tokens, up to the first token of each document."""
        if not self.is_masked:
            return self.num_tokens - len(self)
        return sum(len(batch.tokens) if batch.masks is None else int(batch.masks.sum()) for batch in self._batches)

    @property
    def is_masked(self) -> bool:
        """Whether documents have loss masks."""
        return any(batch.masks is not None for batch in self._batches)

    def __len__(self) -> int:
        return len(self.lens)

    def __getitem__(self, index: int) -> np.ndarray:
        batch, inner = self._find(index)
        return batch.tokens[batch.offsets[inner] : batch.offsets[inner + 1]]

    def loss_mask(self, index: int) -> np.ndarray | None:
        batch, inner = self._find(index)
        return None if batch.masks is None else batch.masks[batch.offsets[inner] : batch.offsets[inner + 1]]

    @property
    def gzip_ratios(self) -> np.ndarray | None:
        """The gzip ratio of each document's text, before tasks were inserted; None if it was not measured."""
        ratios = [batch.ratios for batch in self._batches]
        found = [each for each in ratios if each is not None]
        return np.concatenate(found) if found and len(found) == len(ratios) else None

    def stored(self, index: int) -> StoredTokens:
        """Return `reader[index]` as a handle that reads from the file, for random access to a whole corpus.

        A mapped page counts as this process's memory, and the kernel maps a megabyte or more around each access. Random
        access through the map would soon count the whole corpus as memory.
        """
        return StoredTokens(self._file(index), int(self._token_starts[index]), int(self.lens[index]))

    def stored_mask(self, index: int) -> StoredTokens | None:
        if self._find(index)[0].masks is None:
            return None
        return StoredTokens(self._file(index), int(self._mask_starts[index]), int(self.lens[index]), np.bool_)

    def _file(self, index: int) -> BinaryIO:
        if not self._files:
            self._locate_documents()
        return self._files[bisect_right(self._first_docs, index) - 1]

    def _locate_documents(self) -> None:
        token_starts: list[np.ndarray] = []
        mask_starts: list[np.ndarray] = []
        batches = iter(self._batches)
        for path in self._paths:
            self._files.append(path.open("rb", buffering=0))
            self._first_docs.append(sum(map(len, token_starts)))
            for (tokens_at, masks_at), batch in zip(_batch_offsets(path), batches, strict=False):
                token_starts.append(tokens_at + 4 * batch.offsets[:-1])
                mask_starts.append(masks_at + batch.offsets[:-1])
        self._token_starts, self._mask_starts = np.concatenate(token_starts), np.concatenate(mask_starts)

    def id(self, index: int) -> str:
        batch, inner = self._find(index)
        return str(batch.ids[inner])

    def __iter__(self) -> Iterator[np.ndarray]:
        for batch in self._batches:
            for start, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
                yield batch.tokens[start:stop]

    def _find(self, index: int) -> tuple[_Batch, int]:
        if not 0 <= index < len(self.lens):
            raise IndexError(f"document {index} of {len(self.lens)}")
        number = bisect_right(self._starts, index) - 1
        return self._batches[number], index - self._starts[number]


def _view_batch(batch: Any) -> _Batch:
    tokens = batch.column("tokens")
    masks = None
    if "loss_mask" in batch.schema.names:
        masks = batch.column("loss_mask").values.to_numpy().view(np.bool_)
    ratios = batch.column("gzip_ratio").to_numpy() if "gzip_ratio" in batch.schema.names else None
    return _Batch(tokens.offsets.to_numpy(), tokens.values.to_numpy(), masks, ratios, batch.column("id"))


def _batch_offsets(path: Path) -> list[tuple[int, int]]:
    """Return the byte offsets of the tokens and masks of each batch in a file; 0 without masks."""
    mapped = pa.memory_map(str(path))
    base = mapped.read_buffer(1).address
    mapped.seek(0)
    arrow = pa.ipc.open_file(mapped)
    batches = [arrow.get_batch(number) for number in range(arrow.num_record_batches)]
    return [(_column_offset(batch, "tokens", base), _column_offset(batch, "loss_mask", base)) for batch in batches]


def _column_offset(batch: Any, column: str, base: int) -> int:
    if column not in batch.schema.names:
        return 0
    values = batch.column(column).values
    return int(values.buffers()[1].address - base + values.type.bit_width // 8 * values.offset)


def open_corpus(folder: Path) -> CorpusReader:
    return CorpusReader(sorted(folder.glob("docs-*.arrow")))


def keep_first(path: Path, count: int) -> None:
    """Truncate a corpus file to its first `count` documents, if it has more."""
    reader = CorpusReader([path])
    if count >= len(reader):
        return
    ratios = reader.gzip_ratios
    with CorpusWriter(path, masked=reader.is_masked, measured=ratios is not None) as writer:
        for index in range(count):
            ratio = None if ratios is None else float(ratios[index])
            writer.append(reader.id(index), reader[index], reader.loss_mask(index), gzip_ratio=ratio)
