"""Source kind `text`: plain text files, also .gz or .zst, one document each."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Item, TextFileSource
from unspool.data.sources.files import Unreadable, checked_text, chunks, decode


class TextSource(TextFileSource):
    """Plain text files, a folder of them or a glob; one document each."""

    kind: Literal["text"]

    file_endings: ClassVar[tuple[str, ...]] = ("",)

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        for path in units:
            try:
                yield Document(f"{path.name}:1", checked_text(decode(_read_content(path))))
            except Unreadable as error:
                yield Bad(str(path), "whole file", error.reason, error.detail)


def _read_content(path: Path) -> bytes:
    parts: list[bytes] = []
    held = 0
    for chunk in chunks(path):
        held += len(chunk)
        if held > MAX_RECORD_BYTES:
            raise Unreadable("too_long", f"more than {MAX_RECORD_BYTES >> 20} MiB of text in one file")
        parts.append(chunk)
    return b"".join(parts)
