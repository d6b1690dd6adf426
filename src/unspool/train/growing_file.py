"""A file that grows by a line at a time and survives a full disk.

Promise: what could not be written waits in memory and is written with the next line; no half line stays behind.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from unspool.base.progress import say


class GrowingFile:
    """Opened to append; `content` is all of it, also what is not on disk yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Unbuffered, so that a write that fails leaves nothing to be written again behind our back.
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._waiting = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write()
        finally:
            self._file.close()

    def append(self, line: str) -> None:
        had_waited = bool(self._waiting)
        self._waiting += line.encode()
        try:
            self._write()
        except OSError as error:
            if not had_waited:
                say(f"{self._path.name} cannot be written now ({error.strerror or error}); its lines wait in memory")

    @property
    def content(self) -> bytes:
        return self._path.read_bytes()[: self._size] + self._waiting

    def _write(self) -> None:
        try:
            while self._waiting:
                written = self._file.write(self._waiting) or 0
                self._waiting = self._waiting[written:]
                self._size += written
        except OSError:
            # Half a line may have been written: it is taken back and waits with the rest.
            self._take_back_half_a_line()
            raise

    def _take_back_half_a_line(self) -> None:
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        self._waiting = content[whole:] + self._waiting
        self._file.truncate(whole)
        self._size = whole
