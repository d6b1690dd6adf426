"""Source kind `repos`: code repositories, one document each: folders, archives, source distributions, wheels.

A document holds all text files of a repository in a seeded random order (as in ProLong, which does not order by
dependency). `left_out` lists every skipped file and the reason. A repository without text is Filtered "empty". One that
cannot be read, or only through unsafe paths, is Bad.

The text depends on the seed, the name and the content of the repository, not on the order of its listing. Links are not
followed. Memory is limited by `MAX_TEXT_BYTES`; if a repository holds more, the same random order decides which files
are kept. Of two members with the same name, the first is used.
"""

import glob
import heapq
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

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
)
from unspool.data.sources.base import MAX_RECORD_BYTES, Bad, Document, Filtered, Item, TextFileSource
from unspool.data.sources.code_filter import MAX_FILE_BYTES, unwanted_content, unwanted_folder, unwanted_name
from unspool.data.sources.files import Unreadable, first_line, nothing_found, printable

MAX_TEXT_BYTES = MAX_RECORD_BYTES
# A comment in many languages, and a plain line in the others; models have seen such lines.
HEADER = "# file: {path}\n"
_MARKERS = (".git", "pyproject.toml", "setup.py", "package.json", "Cargo.toml", "go.mod", "pom.xml", "CMakeLists.txt")
_BOM = b"\xef\xbb\xbf"


class ReposSource(TextFileSource):
    """Code repositories, one document each: folders, .tar.gz, .zip, source distributions, wheels."""

    kind: Literal["repos"]
    path: str = Field(
        description="A folder of repositories and archives, one repository or archive, or a glob pattern."
    )

    file_endings: ClassVar[tuple[str, ...]] = (".tar.gz", ".tgz", ".tar", ".zip", ".whl")
    seeded: ClassVar[bool] = True

    def units(self, root: Path) -> list[Path]:
        """List the repositories: all archives and folders in a folder, unless it is a repository itself."""
        full = root / Path(self.path).expanduser()
        if full.is_file():
            if not is_archive(full):
                raise ConfigError(
                    f"{full} is not an archive; a source of kind repos reads folders or {', '.join(ENDINGS)}."
                )
            return [full]
        if full.is_dir():
            return _repositories_in(full)
        # glob.glob instead of Path.glob, which rejects absolute patterns.
        matches = [Path(match) for match in glob.glob(str(full), recursive=True)]  # noqa: PTH207
        found = sorted(match for match in matches if match.is_dir() or (match.is_file() and is_archive(match)))
        if not found:
            raise ConfigError(nothing_found(self.path, full))
        return found

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        for path in units:
            yield _read_repository(path, seed)


def _repositories_in(folder: Path) -> list[Path]:
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
        f"folder {folder} holds no repository; give a folder with sub-folders (links are not followed) or archives "
        f"({', '.join(ENDINGS)})."
    )


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
    """Collect a repository's files; those that do not fit are the last in the random order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._seen: set[str] = set()
        # A heap of (-rank, path, content); the last file of the random order is on top.
        self._kept: list[tuple[int, str, bytes]] = []
        self._kept_bytes = 0
        self._end = 1 << 128  # rank of the first file that did not fit
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
        # The order is by a hash of the path, so that it is known before all paths are.
        rank = int.from_bytes(blake2b(path.encode(), key=self._key, digest_size=16).digest(), "big")
        if rank > self._end:
            self._left_out.append((path, "repository_full"))
            return
        heapq.heappush(self._kept, (-rank, path, data))
        self._kept_bytes += _size_in_text(path, data)
        while self._kept_bytes > MAX_TEXT_BYTES:
            rank, path, data = heapq.heappop(self._kept)
            self._end = -rank
            self._kept_bytes -= _size_in_text(path, data)
            self._left_out.append((path, "repository_full"))

    def document(self, name: str, file: str, *, strip_top: bool) -> Item:
        if not self._kept:
            return self._without_text(name, file)
        tops = {path.partition("/")[0] for path in self._seen}
        top = f"{tops.pop()}/" if strip_top and len(tops) == 1 and all("/" in path for path in self._seen) else ""
        left_out = tuple(sorted((path.removeprefix(top), reason) for path, reason in self._left_out))
        self._kept.sort()
        text = bytearray()
        while self._kept:  # emptied during the loop, so that memory holds the text once
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


def _size_in_text(path: str, data: bytes) -> int:
    return len(HEADER) + len(path.encode()) + len(data) + 2


class _FileUnreadable(Exception):  # noqa: N818
    """One file of a folder cannot be read (in an archive, the whole archive would be unreadable)."""


def _folder_members(folder: Path) -> Iterator[Member]:
    """Yield the files below a folder; a folder that is skipped completely is one refused member."""
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
                yield build_member(path, found.st_size, _refusal(found.st_mode), partial(_read_content, folder / path))
            elif reason := unwanted_folder(entry.name):
                yield Member(printable(f"{path}/"), 0, reason, _refuse)
            else:
                waiting.append(path)


def _refusal(mode: int) -> str | None:
    if stat.S_ISLNK(mode):
        return UNSAFE_PATH
    return None if stat.S_ISREG(mode) else SPECIAL_FILE


def _read_content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise _FileUnreadable from error


def _refuse() -> bytes:
    raise _FileUnreadable
