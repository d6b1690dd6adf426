"""Read the members of tar and zip archives without unpacking them.

Nothing is written and no link is followed. Neither memory nor time depends on the sizes that an archive declares: every
size is checked before decompression, and decompression stops at a limit. A damaged header, checksum or end makes the
whole archive unreadable. Members come in the archive's own order.
"""

import bz2
import gzip
import io
import lzma
import re
import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from unspool.data.sources.files import MAX_NAME_LEN, Unreadable, damaged, first_line, printable

_GZIP, _BZIP2, _XZ = (".tar.gz", ".tgz"), (".tar.bz2", ".tbz2"), (".tar.xz", ".txz")
_ZIP = (".zip", ".whl")
ENDINGS = (".tar", *_GZIP, *_BZIP2, *_XZ, *_ZIP)

# Source code compresses 3 to 10 times; an archive beyond both limits is malicious, or holds no code.
MAX_RATIO = 200
SMALL_BYTES = 64 << 20  # below this size the ratio is not checked
MAX_UNPACKED_BYTES = 4 << 30
MAX_MEMBERS = 500_000  # more names would fill memory; Linux has 90,000 files
MAX_HEADER_BYTES = 1 << 20  # of one extended tar header
MAX_DIRECTORY_BYTES = 32 << 20  # of a zip file's list of members
_XZ_MEMORY = 256 << 20  # four times what `xz -9` needs
_CHUNK = 1 << 18

# Why a member is refused. code_filter.py drops other files because of their content.
UNSAFE_PATH = "unsafe_path"  # a link, or a path that leads out of the archive
SPECIAL_FILE = "special_file"  # devices, pipes, sparse files
ODD_NAME = "odd_name"  # not UTF-8, control characters, too long
ENCRYPTED = "encrypted"
UNKNOWN_COMPRESSION = "unknown_compression"
REFUSALS = frozenset({UNSAFE_PATH, SPECIAL_FILE, ODD_NAME, ENCRYPTED, UNKNOWN_COMPRESSION})


@dataclass(frozen=True, slots=True)
class Member:
    path: str  # parts joined by "/"; a printable form of the name if refused
    size: int  # in bytes, unpacked
    refused: str | None  # why it must not be read; in archives one of REFUSALS
    read: Callable[[], bytes]  # call once, before the next member; Unreadable if the archive is damaged


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ENDINGS)


def members(path: Path) -> Iterator[Member]:
    """Yield the archive's files, not its folders; Unreadable (truncated, unreadable, archive_bomb) at any point."""
    found = _zip_members(path) if path.name.lower().endswith(_ZIP) else _tar_members(path)
    try:
        for number, member in enumerate(found):
            if number == MAX_MEMBERS:
                raise Unreadable("archive_bomb", f"more than {MAX_MEMBERS:,} members")
            yield member
    except OSError as error:
        raise damaged(error, path) from error


def build_member(name: str, size: int, refused: str | None, read: Callable[[], bytes]) -> Member:
    """Build a member with its normalized path; refuse it if its name is unsafe or odd."""
    # Archives made on Windows may have "\" between folders, and "a\..\..\b" must not pass for a harmless name.
    parts = name.replace("\\", "/").split("/")
    path = "/".join(part for part in parts if part not in ("", "."))
    if not path or len(name) > MAX_NAME_LEN or _has_odd_characters(name):
        refused = ODD_NAME
    elif not parts[0] or ".." in parts or re.match(r"[A-Za-z]:", name):
        refused = refused or UNSAFE_PATH
    return Member(printable(name) if refused else path, size, refused, read)


def _has_odd_characters(name: str) -> bool:
    """Return whether a name has line breaks, other control characters, or bytes that are not UTF-8."""
    return not name.isprintable() and any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name)


def _unpacked_limit(path: Path) -> int:
    return min(MAX_UNPACKED_BYTES, max(SMALL_BYTES, MAX_RATIO * path.stat().st_size))


# --- tar. Not with `tarfile`: it takes a damaged header for the end of the archive and reads headers of any size into
# memory. Before Python 3.11.10, one crafted header can also keep its regular expressions busy for hours.

_BLOCK = 512
_NO_DATA = b"123456"  # links, devices, folders and pipes have no content, even if their size field is not 0
_FOLDER = b"5"
_LINKS = (b"1", b"2")
_REGULAR = (b"0", b"\0", b"7")


def _tar_members(path: Path) -> Iterator[Member]:
    # An uncompressed tar file cannot hold more bytes than its size.
    limit = _unpacked_limit(path) if not path.name.lower().endswith(".tar") else 1 << 62
    stream = _Stream(_unpacked(path), limit)
    extended = _Extended()
    while any(block := stream.take(_BLOCK)):
        _verify_checksum(block)
        kind = block[156:157]
        size = _number(block[124:136])
        if kind in (b"L", b"K", b"x", b"X", b"g"):
            if kind in (b"K", b"g"):  # a link's target and global headers are not needed
                stream.skip(_padded(size))
            else:
                if size > MAX_HEADER_BYTES:
                    raise Unreadable("archive_bomb", f"a header of {size:,} bytes")
                extended.update(kind, stream.take(_padded(size))[:size])
            continue
        if kind == b"S":
            _skip_sparse_map(block, stream)
        name = extended.name or _name(block)
        size = 0 if kind in _NO_DATA else size if extended.size is None else extended.size
        end = stream.position + _padded(size)
        if kind != _FOLDER and not name.endswith("/"):
            if kind in _REGULAR and not extended.sparse:
                refused = None
            else:
                refused = UNSAFE_PATH if kind in _LINKS else SPECIAL_FILE
            yield build_member(name, size, refused, partial(stream.take, size))
        stream.skip(end - stream.position)
        extended = _Extended()
    stream.drain()


class _Extended:
    """Values of GNU and POSIX extension headers for the next member."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.size: int | None = None
        self.sparse = False

    def update(self, kind: bytes, data: bytes) -> None:
        if kind == b"L":
            self.name = _text(data.split(b"\0", 1)[0])
            return
        start = 0
        while start < len(data) and data[start]:
            # "<length of the whole record> <key>=<value>\n"
            space = data.find(b" ", start, start + 10)
            digits = data[start:space] if space > start else b""
            end = start + int(digits) if digits.isdigit() else 0
            key, equals, value = data[space + 1 : end - 1].partition(b"=")
            if not start < space < end <= len(data) or not equals:
                raise Unreadable("unreadable", "a damaged tar header")
            if key == b"path":
                self.name = _text(value)
            elif key == b"size":
                self.size = _decimal(value)
            self.sparse |= key.startswith(b"GNU.sparse.")
            start = end


class _Stream:
    """A byte stream that is read only forward and only up to a limit."""

    def __init__(self, parts: Iterator[bytes], limit: int) -> None:
        self.position = 0
        self._parts = parts
        self._limit = limit
        self._part = memoryview(b"")

    def take(self, size: int) -> bytes:
        return b"".join(self._pass(size))

    def skip(self, size: int) -> None:
        for _ in self._pass(size):
            pass

    def drain(self) -> None:
        """Read to the end, because compressed files keep their checksums there."""
        for part in self._parts:
            self._claim(len(part))

    def _pass(self, size: int) -> Iterator[memoryview]:
        self._claim(size)
        while size > len(self._part):
            size -= len(self._part)
            yield self._part
            try:
                self._part = memoryview(next(self._parts))
            except StopIteration:
                raise Unreadable("truncated", "truncated; the archive has no end mark") from None
        yield self._part[:size]
        self._part = self._part[size:]

    def _claim(self, size: int) -> None:
        self.position += size
        if self.position > self._limit:
            raise Unreadable("archive_bomb", f"unpacks to more than {self._limit:,} bytes")


def _verify_checksum(block: bytes) -> None:
    counted = block[:148] + b" " * 8 + block[156:]
    difference = sum(counted) - _number(block[148:156])
    # Some very old programs sum signed bytes.
    if difference and difference != 256 * sum(byte > 127 for byte in counted):
        raise Unreadable("unreadable", "not a tar archive, or a damaged one (a header's checksum is wrong)")


def _number(field: bytes) -> int:
    if field[0] == 0x80:  # GNU's encoding of large numbers
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    if not re.fullmatch(rb"[0-7]*", digits):
        raise Unreadable("unreadable", "not a tar archive, or a damaged one (a number in a header is invalid)")
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    if not re.fullmatch(rb"[0-9]{1,19}", digits):
        raise Unreadable("unreadable", "a damaged tar header")
    return int(digits)


def _name(block: bytes) -> str:
    name, prefix = (field.split(b"\0", 1)[0] for field in (block[:100], block[345:500]))
    # GNU's own format has another magic value, and timestamps in place of the prefix.
    return _text(prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _skip_sparse_map(block: bytes, stream: _Stream) -> None:
    more = block[482]
    while more:
        more = stream.take(_BLOCK)[504]


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _unpacked(path: Path) -> Iterator[bytes]:
    """Yield a tar file's content, decompressed by its suffix."""
    name = path.name.lower()
    try:
        with path.open("rb") as file:
            if name.endswith(_GZIP):
                with gzip.open(file) as content:
                    yield from iter(partial(content.read, _CHUNK), b"")
            elif name.endswith(_BZIP2):
                yield from _decompressed(file, bz2.BZ2Decompressor)
            elif name.endswith(_XZ):
                yield from _decompressed(file, partial(lzma.LZMADecompressor, memlimit=_XZ_MEMORY))
            else:
                yield from iter(partial(file.read, _CHUNK), b"")
    except EOFError as error:
        raise Unreadable("truncated", "the compressed file is truncated") from error
    except (OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise damaged(error, path) from error


def _decompressed(
    file: BinaryIO, build_decoder: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
) -> Iterator[bytes]:
    # Not bz2.open and lzma.open: the first ignores what follows a damaged end, and the second has no memory limit.
    decoder = None
    while data := file.read(_CHUNK):
        while data:
            if decoder is None:
                data = data.lstrip(b"\0")  # padding
                if not data:
                    break
                decoder = build_decoder()
            yield decoder.decompress(data, _CHUNK)
            while not (decoder.eof or decoder.needs_input):
                yield decoder.decompress(b"", _CHUNK)
            data = decoder.unused_data if decoder.eof else b""
            decoder = None if decoder.eof else decoder
    if decoder is not None:
        raise EOFError


# --- zip

_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, LookupError, struct.error)
_UTF8_NAME = 0x800
_HEADER_LEN = 30  # of a member, at least
_END_LEN = 22


def _zip_members(path: Path) -> Iterator[Member]:
    with _BoundedReads(path, "rb") as file:
        start = file.read(4)
        try:
            archive = zipfile.ZipFile(file)
        except _ZIP_ERRORS as error:
            # The list of members is at the end of a zip file. A file that begins like a zip file but has no list is
            # truncated.
            reason = "truncated" if start == b"PK\3\4" and not _end_record(path) else "unreadable"
            raise Unreadable(reason, first_line(error)) from error
        with archive:
            found = sorted(archive.infolist(), key=lambda info: info.header_offset)
            # zipfile trusts the declared size of the list; if that is damaged, members would be lost silently.
            count = int.from_bytes(_end_record(path)[10:12], "little")
            if count not in (len(found) & 0xFFFF, 0xFFFF):  # 0xFFFF: the count is stored elsewhere
                raise Unreadable("unreadable", f"lists {len(found):,} members instead of {count:,}")
            _refuse_zip_bomb(found, archive.start_dir, _unpacked_limit(path))
            for info in found:
                mode = info.external_attr >> 16
                if not info.filename.endswith("/") and not stat.S_ISDIR(mode):
                    reading = partial(_read_zipped, archive, info)
                    yield build_member(_zip_name(info), info.file_size, _zip_refusal(info, mode), reading)


class _BoundedReads(io.FileIO):
    """A file that limits single reads, because zipfile reads the whole list of members at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise Unreadable("archive_bomb", f"a list of members of {size:,} bytes")
        return super().read(size) or b""


def _end_record(path: Path) -> bytes:
    """Read the record at the end of a zip file, before its comment; b"" if it is missing."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16) - _END_LEN))
        tail = file.read()
    record = tail[max(0, tail.rfind(b"PK\5\6")) :][:_END_LEN]
    return record if record.startswith(b"PK\5\6") and len(record) == _END_LEN else b""


def _refuse_zip_bomb(found: list[zipfile.ZipInfo], directory_start: int, limit: int) -> None:
    if sum(info.file_size for info in found) > limit:
        raise Unreadable("archive_bomb", f"unpacks to more than {limit:,} bytes")
    # Members that share bytes of the file can expand to any total size.
    starts = [*(info.header_offset for info in found[1:]), directory_start]
    for info, next_start in zip(found, starts, strict=False):
        if info.header_offset + _HEADER_LEN + info.compress_size > next_start:
            raise Unreadable("archive_bomb", f"member {printable(info.filename)!r} overlaps the next")


def _zip_refusal(info: zipfile.ZipInfo, mode: int) -> str | None:
    if stat.S_ISLNK(mode):
        return UNSAFE_PATH
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return SPECIAL_FILE
    if info.flag_bits & 1:
        return ENCRYPTED
    # Decoders of other methods cannot be stopped at a size; wheels and code hosts do not use them.
    return None if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) else UNKNOWN_COMPRESSION


def _zip_name(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & _UTF8_NAME:
        return info.filename
    try:  # many programs write UTF-8 without the flag; zipfile then decodes cp437
        return info.filename.encode("cp437").decode()
    except UnicodeError:
        return info.filename


def _read_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        with archive.open(info) as file:
            data = file.read(info.file_size)  # stops at the declared size, and checks the CRC at the end
    except _ZIP_ERRORS as error:
        raise Unreadable("unreadable", first_line(error)) from error
    if len(data) != info.file_size:
        raise Unreadable("unreadable", f"member {printable(info.filename)!r} is shorter than its declared size")
    return data
