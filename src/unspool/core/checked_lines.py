"""Files of lines that a killed run continues; a second file holds a checksum of every line.

The checksums are in `<name>.sums`, because the finished file is a result with its own format.
"""

import hashlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

SUMS = ".sums"
_WIDTH = 16  # hexadecimal digits of a checksum


def read_checked(path: Path) -> list[bytes | None]:
    """Read the lines that have a checksum; None for a damaged one. Lines without one come from a kill; drop them."""
    lines = [line + b"\n" for line in _read(path).split(b"\n")[:-1]]
    sums = [entry for entry in _read(_sums(path)).split(b"\n") if entry]
    pairs = enumerate(zip(lines, sums, strict=False))
    found = [line if _sum(at, line) == entry else None for at, (line, entry) in pairs]
    found += [None] * (len(sums) - len(found))
    if lines and not _sums(path).exists():
        logger.warning(f"{path}: its checksums ({_sums(path).name}) are missing; recomputing {len(lines)} lines")
    elif None in found:
        damaged, first = found.count(None), found.index(None) + 1
        logger.warning(
            f"{path}: {damaged} of {len(found)} lines are damaged, the first is line {first}; recomputing them"
        )
    return found


def intact_lines(path: Path) -> list[bytes]:
    """Read the lines before the first damaged one."""
    found = read_checked(path)
    end = found.index(None) if None in found else len(found)
    return [line for line in found[:end] if line is not None]


class CheckedLines:
    """Append to a file after its `kept` first lines: `with CheckedLines(path, kept) as lines: …`."""

    def __init__(self, path: Path, kept: list[bytes]) -> None:
        self._count = len(kept)
        # Unbuffered, so that a line is in the file when `append` returns.
        self._lines = path.open("ab", buffering=0)
        self._lines.truncate(sum(map(len, kept)))
        self._sums = _sums(path).open("ab", buffering=0)
        self._sums.truncate(len(kept) * (_WIDTH + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._sums.close()

    def append(self, *lines: bytes) -> None:
        """Write lines, each of which ends with a line break, and then their checksums."""
        _write_all(self._lines, b"".join(lines))
        sums = [_sum(self._count + at, line) + b"\n" for at, line in enumerate(lines)]
        _write_all(self._sums, b"".join(sums))
        self._count += len(lines)


def _sums(path: Path) -> Path:
    return path.with_name(path.name + SUMS)


def _sum(at: int, line: bytes) -> bytes:
    """Checksum of a line and its number, so that swapped lines are detected."""
    return hashlib.sha256(b"%d " % at + line).hexdigest()[:_WIDTH].encode()


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _write_all(file: Any, data: bytes) -> None:
    while data:
        data = data[file.write(data) or 0 :]
