"""Code repositories, one document each: folders, tar and zip archives, source distributions, wheels.

In: folders and archives. Out: per repository one `Document` of all its text files in a seeded random order (as in
ProLong, which orders nothing by dependency), with every file it lacks and the reason in `left_out`; a repository
without text is Filtered "empty", one that cannot be read, or only through unsafe paths, is Bad.
Promise: the text depends on seed, name and content of the repository, not on the order in which a file system or an
archive lists it. Links are not followed. Memory is bounded by `MAX_TEXT_BYTES`, whatever a repository holds: which
files then find room is decided by the same random order.
Price: a folder left out as a whole, such as .git, is one entry of `left_out`. Of two members with one name the first
counts. A text with one character beyond U+FFFF takes four bytes a character in memory.
Elsewhere: archives (archives.py), what is left out (code_filter.py).
"""

import glob
import heapq
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.data.sources.archives import (
    ENDINGS,
    REFUSALS,
    SPECIAL_FILE,
    UNSAFE_PATH,
    Member,
    build_member,
    is_archive,
    members,
    printable,
)
from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Filtered, Item
from unspool.data.sources.code_filter import MAX_FILE_BYTES, unwanted_content, unwanted_folder, unwanted_name
from unspool.data.sources.config import ReposSource
from unspool.data.sources.files import Unreadable, first_line, nothing_found

MAX_TEXT_BYTES = MAX_RECORD_BYTES
# A comment in many languages and a plain line in all others. No token of any tokenizer is needed for it, and people
# write such lines too, so a model has seen them.
HEADER = "# file: {path}\n"
_MARKERS = (".git", "pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod", "pom.xml", "CMakeLists.txt")
_BOM = b"\xef\xbb\xbf"


def units(source: ReposSource, root: Path) -> list[Path]:
    """The repositories: of a folder all archives and sub-folders in it, unless it is a repository itself."""
    full = root / Path(source.path).expanduser()
    if full.is_file():
        if not is_archive(full):
            raise ConfigError(f"{full} is no archive; a source of kind repos takes folders and {', '.join(ENDINGS)}.")
        return [full]
    if full.is_dir():
        return _units_of_folder(full)
    # glob.glob and not Path.glob, which refuses absolute patterns.
    matches = [Path(match) for match in glob.glob(str(full), recursive=True)]  # noqa: PTH207
    found = sorted(match for match in matches if match.is_dir() or (match.is_file() and is_archive(match)))
    if not found:
        raise ConfigError(nothing_found(source.path, full))
    return found


def _units_of_folder(folder: Path) -> list[Path]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    archives = [entry for entry in entries if entry.is_file() and is_archive(entry)]
    folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    if any((folder / marker).exists() for marker in _MARKERS):
        return [folder]
    if archives or folders:
        return sorted([*archives, *folders])
    if any(entry.is_file() for entry in entries):
        return [folder]
    raise ConfigError(
        f"folder {folder} holds no repository; it needs sub-folders (links are not followed) or archives "
        f"({', '.join(ENDINGS)})."
    )


def read(source: ReposSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    for path in units:
        yield _read_repository(path, seed)


def _read_repository(path: Path, seed: int) -> Item:
    name = printable(path.absolute().name)  # Path(".") has none
    repository = _Repository(rng_for(seed, "repos", name).bytes(32))
    is_folder = path.is_dir()
    try:
        for member in _folder_members(path) if is_folder else members(path):
            repository.add(member)
    except Unreadable as error:
        return Bad(str(path), "whole repository", error.reason, error.detail)
    return repository.document(name, str(path), strip_top=not is_folder)


class _Repository:
    """Gathers a repository's files; those that do not fit are the last ones of the random order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seen: set[str] = set()
        # The kept files, the last of the order on top: (minus its place, path, content).
        self._kept: list[tuple[int, str, bytes]] = []
        self._kept_bytes = 0
        self._end = 1 << 128  # the place of the first file that found no room
        self._left_out: list[tuple[str, str]] = []

    def add(self, member: Member) -> None:
        reason = member.refused or ("duplicate" if member.path in self._seen else None)
        if not member.refused:
            self._seen.add(member.path)
        reason = reason or unwanted_name(member.path, member.size)
        if reason is None:
            try:
                data = member.read().removeprefix(_BOM)
            except _FileUnreadable:
                reason = "unreadable"
            else:
                reason = unwanted_content(member.path, data)
        if reason is None:
            self._keep(member.path, data)
        else:
            self._left_out.append((member.path, reason))

    def _keep(self, path: str, data: bytes) -> None:
        # A place of its own for every path, so that the order is known before all paths are.
        place = int.from_bytes(blake2b(path.encode(), key=self._key, digest_size=16).digest(), "big")
        if place > self._end:
            self._left_out.append((path, "repository_full"))
            return
        heapq.heappush(self._kept, (-place, path, data))
        self._kept_bytes += _room(path, data)
        while self._kept_bytes > MAX_TEXT_BYTES:
            place, path, data = heapq.heappop(self._kept)
            self._end = -place
            self._kept_bytes -= _room(path, data)
            self._left_out.append((path, "repository_full"))

    def document(self, name: str, file: str, *, strip_top: bool) -> Item:
        if not self._kept:
            return self._without_text(name, file)
        tops = {path.partition("/")[0] for path in self._seen}
        top = f"{tops.pop()}/" if strip_top and len(tops) == 1 and all("/" in path for path in self._seen) else ""
        left_out = tuple(sorted((path.removeprefix(top), reason) for path, reason in self._left_out))
        self._kept.sort()
        text = bytearray()
        while self._kept:  # emptied on the way, so that the text is held once
            _, path, data = self._kept.pop()
            text += b"\n" if text else b""
            text += HEADER.format(path=path.removeprefix(top)).encode() + data
            text += b"" if data.endswith(b"\n") else b"\n"
        return Document(f"{name}:1", text.decode(), left_out=left_out)

    def _without_text(self, name: str, file: str) -> Item:
        reasons = {reason for _, reason in self._left_out}
        if not reasons or not reasons <= REFUSALS | {"unreadable"}:
            return Filtered(f"{name}:1", "empty")
        reason = UNSAFE_PATH if UNSAFE_PATH in reasons else "unreadable"
        detail = f"none of its {len(self._left_out):,} files can be read ({', '.join(sorted(reasons))})"
        return Bad(file, "whole repository", reason, detail)


def _room(path: str, data: bytes) -> int:
    return len(HEADER) + len(path.encode()) + len(data) + 2


class _FileUnreadable(Exception):  # noqa: N818
    """One file of a folder cannot be read; of an archive, the whole archive could not."""


def _folder_members(folder: Path) -> Iterator[Member]:
    """The files below a folder. A folder that is not wanted comes as one member, which is refused."""
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            entries = list(os.scandir(folder / inside))
        except OSError as error:
            if not inside:
                raise Unreadable("unreadable", first_line(error)) from error
            yield Member(printable(f"{inside}/"), 0, "unreadable", _refuse)
            continue
        for entry in entries:
            path = f"{inside}/{entry.name}".removeprefix("/")
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                yield Member(printable(path), 0, "unreadable", _refuse)
                continue
            if not stat.S_ISDIR(found.st_mode):
                yield build_member(path, found.st_size, _refusal(found.st_mode), partial(_content, folder / path))
            elif reason := unwanted_folder(entry.name):
                yield Member(printable(f"{path}/"), 0, reason, _refuse)
            else:
                waiting.append(path)


def _refusal(mode: int) -> str | None:
    if stat.S_ISLNK(mode):
        return UNSAFE_PATH
    return None if stat.S_ISREG(mode) else SPECIAL_FILE


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise _FileUnreadable from error


def _refuse() -> bytes:
    raise _FileUnreadable
