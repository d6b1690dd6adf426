"""Files of any source: found, decompressed, cut into lines, decoded.

Promise: memory is bounded by one line below the limit; a file that breaks off is told from one that ends.
Elsewhere: what a line or record means (the readers beside this file).
"""

import glob
import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import zstandard

from unspool.core.errors import ConfigError

_CHUNK = 1 << 20
_ZSTD_PIECE = 4 << 10


class Unreadable(Exception):  # noqa: N818
    """Content that cannot be read: the reason that is counted, and a sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def find_files(path: str, root: Path, *, kind: str, endings: tuple[str, ...]) -> list[Path]:
    """The files of a source, sorted: one file, those with the right endings in a folder, or those of a pattern.

    Hidden files are left out of folders. An ending of "" takes every file.
    """
    full = root / Path(path).expanduser()
    if full.is_file():
        return [full]
    if full.is_dir():
        found = [file for file in full.rglob("*") if not _hidden(file.relative_to(full))]
        found = [file for file in found if file.name.endswith(endings) and file.is_file()]
        if not found:
            wanted = "plain text" if "" in endings else " or ".join(endings)
            raise ConfigError(f"folder {full} holds no {wanted} files; a source of kind {kind} needs at least one.")
        return sorted(found)
    # glob.glob and not Path.glob, which refuses absolute patterns.
    matches = sorted(file for file in map(Path, glob.glob(str(full), recursive=True)) if file.is_file())  # noqa: PTH207
    if not matches:
        raise ConfigError(nothing_found(path, full))
    return matches


def nothing_found(path: str, full: Path) -> str:
    what = "matches no file" if glob.has_magic(str(full)) else "does not exist"
    return f"path {path!r} {what} (looked for {full}); give a file, a folder or a pattern."


def chunks(path: Path) -> Iterator[bytes]:
    """The file's content, decompressed by its ending; Unreadable where it breaks off."""
    try:
        if path.suffix == ".zst":
            yield from _zstd_chunks(path)
        else:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
    except FileNotFoundError as error:
        raise Unreadable("unreadable", "the file has gone") from error
    except EOFError as error:
        raise Unreadable("truncated", "cut short; the compressed file has no end") from error
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise Unreadable("unreadable", first_line(error)) from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    # zstandard's stream_reader takes a cut-off file for a finished one; a decompressobj knows whether
    # its frame ended. Small pieces go in, since what comes out of one can be 32,000 times larger.
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
    """The lines, without their ends; None for a line of more than `limit` bytes, which is never held whole."""
    begun: list[bytes] = []  # the parts of a line that spans chunks; joined once, however long it is
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
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("invalid_utf8", f"not valid UTF-8 at byte {error.start}") from error


def checked_text(text: str) -> str:
    """Text that can be tokenised and stored, else Unreadable."""
    if "\0" in text:
        raise Unreadable("nul", f"a NUL character at {text.index(chr(0))}; such data is rarely text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is not a character and cannot be tokenised.
        raise Unreadable("surrogate", f"half a surrogate pair at character {error.start}") from error
    return text


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
