"""Plain text files, also .gz or .zst: one document each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Item
from unspool.data.sources.config import TextSource
from unspool.data.sources.files import Unreadable, checked_text, chunks, decode, find_files


def units(source: TextSource, root: Path) -> list[Path]:
    return find_files(source.path, root, kind="text", endings=("",))


def read(source: TextSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        try:
            yield Document(f"{path.name}:1", checked_text(decode(_content(path))))
        except Unreadable as error:
            yield Bad(str(path), "whole file", error.reason, error.detail)


def _content(path: Path) -> bytes:
    parts: list[bytes] = []
    held = 0
    for chunk in chunks(path):
        held += len(chunk)
        if held > MAX_RECORD_BYTES:
            raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB of text in one file")
        parts.append(chunk)
    return b"".join(parts)
