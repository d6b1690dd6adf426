"""Find, decompress, split and decode the files of sources.

Memory is limited by the maximum length of a line. Truncated files are detected.
"""

import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from unspool.core.errors import ConfigError, naming, system_error

MAX_NAME_LEN = 1024
_CHUNK = 1 << 20
_ZSTD_PIECE = 4 << 10


class Unreadable(Exception):  # noqa: N818
    """Content that cannot be read: the reason to count it by, and a sentence for users."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def damaged(error: Exception, path: Path, what: str = "{}") -> Unreadable:
    """Return the exception for content that a library could not read; re-raise operating system errors.

    A vanished file or a failing disk is not a property of the content: the next run may be able to read it.
    """
    with naming(path):
        if system_error(error) is not None:
            raise error
    return Unreadable("unreadable", what.format(first_line(error)))


def find_files(path: str, root: Path, *, kind: str, endings: tuple[str, ...]) -> list[Path]:
    """List the files of a source, sorted: one file, a folder's files with these endings, or the matches of a pattern.

    Hidden files in folders are skipped. The suffix "" matches every file.
    """
    full = root / Path(path).expanduser()
    if full.is_file():
        return [full]
    if full.is_dir():
        found = [file for file in full.rglob("*") if not _is_hidden(file.relative_to(full))]
        found = [file for file in found if file.name.endswith(endings) and file.is_file()]
        if not found:
            wanted = "plain text" if "" in endings else " or ".join(endings)
            raise ConfigError(f"folder {full} holds no {wanted} files; a source of kind {kind} needs at least one.")
        return sorted(found)
    # glob.glob instead of Path.glob, which rejects absolute patterns.
    matches = sorted(file for file in map(Path, glob.glob(str(full), recursive=True)) if file.is_file())  # noqa: PTH207
    if not matches:
        raise ConfigError(nothing_found(path, full))
    return matches


def nothing_found(path: str, full: Path) -> str:
    """Return the error message for a path without files."""
    what = "matches no file" if glob.has_magic(str(full)) else "does not exist"
    return f"path {path!r} {what} (looked for {full}); give a file, a folder or a pattern."


def matching_files(path: str) -> Iterator[Path]:
    """Yield all files of a file, folder or pattern; nothing if none match."""
    found = glob.iglob(path, recursive=True) if glob.has_magic(path) else iter([path])  # noqa: PTH207
    for match in map(Path, found):
        if match.is_file():
            yield match
        elif match.is_dir():
            yield from (file for file in sorted(match.rglob("*")) if file.is_file())


def files_below(unit: Path) -> list[Path]:
    """List a unit's files: the file itself, or everything in a folder (links are not followed)."""
    if not unit.is_dir():
        return [unit]
    return sorted(file for file in unit.rglob("*") if file.is_file() and not file.is_symlink())


def chunks(path: Path) -> Iterator[bytes]:
    """Yield the file's content, decompressed by its suffix; Unreadable if the file is truncated."""
    try:
        if path.suffix == ".zst":
            yield from _zstd_chunks(path)
        else:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
    except EOFError as error:
        raise Unreadable("truncated", "the compressed file is truncated") from error
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise damaged(error, path) from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    # zstandard's stream_reader reads a truncated file without an error, but a decompressobj knows whether its frame has
    # ended. Only small pieces are fed in, because the output can be 32,000 times larger.
    frame = None
    with path.open("rb") as file:
        while data := file.read(_ZSTD_PIECE):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def lines(parts: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """Yield the lines without their ends; None for a line above `limit` bytes, which is never kept in memory."""
    begun: list[bytes] = []  # parts of a line that spans chunks; joined only once
    held = 0
    for chunk in parts:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            held += end - start
            yield b"".join([*begun, chunk[start:end]]) if held <= limit else None
            begun, held, start = [], 0, end + 1
        held += len(chunk) - start
        if held <= limit:
            begun.append(chunk[start:])
        else:
            begun = []
    if held:
        yield b"".join(begun) if held <= limit else None


def decode(data: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark; Unreadable if it is invalid."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("invalid_utf8", f"not valid UTF-8 at byte {error.start}") from error


def checked_text(text: str) -> str:
    """Return the text if it can be tokenized and stored; Unreadable otherwise."""
    if "\0" in text:
        raise Unreadable("nul", f"a NUL character at {text.index(chr(0))}; such data is rarely text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can encode an unpaired surrogate, which is not a character and cannot be tokenized.
        raise Unreadable("surrogate", f"an unpaired surrogate at character {error.start}") from error
    return text


def printable(name: str) -> str:
    """Return the name as one line of valid UTF-8."""
    escaped = name[:MAX_NAME_LEN].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in escaped)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def list_names(names: Iterable[str], nothing: str, most: int = 12) -> str:
    """List the first names, quoted, for error messages; `nothing` if there are none."""
    return ", ".join(map(repr, list(names)[:most])) or nothing


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
