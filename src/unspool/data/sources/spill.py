"""Group records by a key on disk: an external sort with constant memory, for any input and group size.

`SpillWriter` sorts as much as fits into memory and writes it as a run, divided into parts by ranges of the key.
`read_part` merges one part of all runs. All records of a key are in one part, in the order of `rank`.

A run is complete when its index exists, which is written last. Each part is one zstd frame with a checksum.
"""

import heapq
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import IO, Self, cast

import numpy as np
import zstandard

from unspool.core.errors import DataError

# Bytes of records that are sorted in memory at a time.
SORT_BYTES = 128 << 20
_HEADER = struct.Struct(">16s16sIIII")
_PIECE = 256 << 10
# A small window, because a merge reads a frame of every run at the same time.
_WINDOW_LOG = 18


@dataclass(frozen=True, slots=True)
class Spilled:
    """One record: its group, its rank in the group, and three fields of the source."""

    key: bytes  # 16 bytes
    rank: bytes  # 16 bytes
    group: bytes
    name: bytes
    data: bytes
    note: bytes = b""

    @property
    def order(self) -> bytes:
        return self.key + self.rank

    @property
    def size(self) -> int:
        return _HEADER.size + len(self.group) + len(self.name) + len(self.data) + len(self.note)


def _run_path(folder: Path, number: int) -> Path:
    return folder / f"run-{number:05d}.zst"


def _index_path(folder: Path, number: int) -> Path:
    return folder / f"run-{number:05d}.npy"


def is_intact(folder: Path, number: int) -> bool:
    """Return whether a run is complete: its index exists and its file has the size in the index."""
    try:
        return int(np.load(_index_path(folder, number))[-1, -1]) == _run_path(folder, number).stat().st_size
    except (OSError, ValueError, IndexError):
        return False


class SpillWriter:
    """Write run `number` of a folder; a context manager."""

    def __init__(self, folder: Path, number: int, num_parts: int) -> None:
        self._folder, self._number, self._num_parts = folder, number, num_parts
        _index_path(folder, number).unlink(missing_ok=True)
        self._file = _run_path(folder, number).open("wb")
        self._held: list[Spilled] = []
        self._held_bytes = 0
        self._offsets: list[list[int]] = []
        settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=_WINDOW_LOG, write_checksum=True)
        self._compressor = zstandard.ZstdCompressor(compression_params=settings)

    def add(self, record: Spilled) -> None:
        self._held.append(record)
        self._held_bytes += record.size
        if self._held_bytes >= SORT_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._held.sort(key=attrgetter("order"))
        offsets = [self._file.tell()]
        start = 0
        for part in range(self._num_parts):
            stop = start
            while stop < len(self._held) and part_of(self._held[stop].key, self._num_parts) == part:
                stop += 1
            if stop > start:
                with self._compressor.stream_writer(self._file, closefd=False) as frame:
                    for record in self._held[start:stop]:
                        fields = (record.group, record.name, record.data, record.note)
                        frame.write(_HEADER.pack(record.key, record.rank, *map(len, fields)) + b"".join(fields))
            offsets.append(self._file.tell())
            start = stop
        self._offsets.append(offsets)
        self._held, self._held_bytes = [], 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            aside = _index_path(self._folder, self._number).with_suffix(".tmp")
            with aside.open("wb") as file:
                np.save(file, np.array(self._offsets, dtype=np.int64))
            aside.replace(_index_path(self._folder, self._number))


def part_of(key: bytes, num_parts: int) -> int:
    """Return the part of a key; parts are equal ranges of keys."""
    return int.from_bytes(key[:8], "big") * num_parts >> 64


def read_part(folder: Path, part: int) -> Iterator[Spilled]:
    """Yield the records of one part, sorted by key and rank; equal ones in the order of writing."""
    streams = []
    for index in sorted(folder.glob("run-*.npy")):
        number = int(index.stem.removeprefix("run-"))
        for offsets in np.load(index):
            start, stop = int(offsets[part]), int(offsets[part + 1])
            if stop > start:
                streams.append(_read_frame(folder, number, start, stop))
    return heapq.merge(*streams, key=attrgetter("order"))


def _read_frame(folder: Path, number: int, start: int, stop: int) -> Iterator[Spilled]:
    path = _run_path(folder, number)
    try:
        with zstandard.ZstdDecompressor().stream_reader(cast(IO[bytes], _Span(path, start, stop))) as frame:
            while header := _read_exactly(frame, _HEADER.size, last=True):
                key, rank, *lens = _HEADER.unpack(header)
                content = _read_exactly(frame, sum(lens))
                ends = accumulate(lens, initial=0)
                yield Spilled(key, rank, *(content[begin:end] for begin, end in pairwise(ends)))
    except (EOFError, zstandard.ZstdError) as error:
        _index_path(folder, number).unlink(missing_ok=True)  # so that the next build writes it again
        raise DataError(
            f"the intermediate file {path} is damaged; run the same command again to rewrite it."
        ) from error


def _read_exactly(frame: zstandard.ZstdDecompressionReader, size: int, *, last: bool = False) -> bytes:
    parts: list[bytes] = []
    missing = size
    while missing and (data := frame.read(missing)):
        parts.append(data)
        missing -= len(data)
    if missing and not (last and missing == size):
        raise EOFError
    return b"".join(parts)


class _Span:
    """Bytes `start` to `stop` of a file, opened for each read: a merge may need thousands of files at once."""

    def __init__(self, path: Path, start: int, stop: int) -> None:
        self._path, self._at, self._stop = path, start, stop

    def read(self, size: int = -1) -> bytes:
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._at)
            data = file.read(min(max(size, _PIECE), self._stop - self._at))
        if not data and self._at < self._stop:
            raise EOFError
        self._at += len(data)
        return data
