"""Artifacts: folders that are published complete or not at all, each with a `manifest.json`.

A folder is complete if its manifest lists files and all of them exist. Unfinished work has another name, next to it. A
rerun skips a folder whose manifest matches its inputs and settings. A kill while a folder is replaced loses neither the
old nor the new one. Folders are renamed before they are deleted, so a kill cannot leave a half-deleted folder that a
later run takes for work.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from unspool import __version__
from unspool.core.errors import ConfigError, naming

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
KEY = "key"  # file of a work folder: digest of the inputs and settings that it belongs to
# Increase this when the meaning of stored files changes, so that older folders are rebuilt.
FORMAT = 1
# Up to this size a rerun also compares checksums. Above it, only names and sizes, so that skipping a terabyte is
# instant.
CHECKSUM_LIMIT = 256 << 20
ASIDE = ".tmp"  # suffix of a file that is still being written
# Suffixes of an earlier recipe's unfinished work, and of a folder that is being deleted.
PREVIOUS, REMOVED = ".previous", ".removed"
# Suffixes of folders and files that are next to finished folders and are not results.
WORK_ENDINGS = (".work", ".partial", ".old", ASIDE, PREVIOUS, REMOVED, ".lock")


def digest(value: Any) -> str:
    """Hash any JSON-serializable value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Number of files that are hashed or written at the same time: one thread hashes 1 to 2 GB/s, a disk may be faster.
MAX_THREADS = max(1, min(8, os.cpu_count() or 1))
# Digests of files that were hashed while they were written, by the state of the file after writing.
_written: dict[tuple[int, ...], str] = {}


def remember_digest(written: os.stat_result, sha256: str) -> None:
    """Record the digest of a file that was hashed while it was written, for `digest_once` and `list_files`."""
    _written[_state(written)] = sha256


# Requested digests, by path and state of the file; another thread may still be computing one.
_asked: dict[tuple[Path, tuple[int, ...]], Future[str]] = {}
_asking = Lock()


def digest_once(path: Path) -> str:
    """Return `file_digest`, computed once per unchanged file: loading and scoring both need it."""
    key = path, _state(path.stat())
    with _asking:
        found = _asked.get(key)
        mine = found is None or (found.done() and found.exception() is not None)
        if mine:
            found = _asked[key] = Future()
    assert found is not None
    if mine:
        try:
            found.set_result(_digest_written(path))
        except BaseException as error:
            found.set_exception(error)
    return found.result()


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def hash_files(paths: Sequence[Path], of_file: Callable[[Path], str] = file_digest) -> list[str]:
    """Hash several files at the same time; digests are in the order of `paths`."""
    if len(paths) < 2:
        return [of_file(path) for path in paths]
    with ThreadPoolExecutor(min(MAX_THREADS, len(paths)), "unspool-digests") as pool:
        return list(pool.map(of_file, paths))


def folder_digest(folder: Path, of_file: Callable[[Path], str] = file_digest) -> str:
    """Hash names and contents of all files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = (str(path.relative_to(folder)) for path in files)
    return digest(dict(zip(names, hash_files(files, of_file), strict=True)))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        loaded = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


def stale_reason(folder: Path, *, kind: str, inputs: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """Return why `folder` must be rebuilt from these inputs and settings; None if it is up to date."""
    _repair(folder)
    if not folder.exists():
        return "not built yet"
    manifest = read_manifest(folder)
    if manifest is None:
        return "its manifest is missing or unreadable"
    if manifest.get("kind") != kind or manifest.get("format") != FORMAT:
        return "it has another format version"
    for name, new in (("inputs", inputs), ("settings", settings)):
        old = manifest.get(name, {})
        changed = sorted(key for key in {*old, *new} if digest(old.get(key)) != digest(new.get(key)))
        if changed:
            return f"changed {name}: {', '.join(changed)}"
    return find_damage(folder)


def find_damage(folder: Path) -> str | None:
    """Describe what is wrong with a published folder; None if all files match its manifest."""
    manifest = read_manifest(folder)
    if manifest is None:
        return "its manifest is missing or unreadable"
    checksum = manifest.pop("sha256", None)
    if checksum is not None and checksum != digest(manifest):  # manifests of older versions have none
        return "its manifest has changed"
    files = manifest.get("files")
    if not isinstance(files, dict):
        return "its manifest lists no files"
    return changed_file(folder, files, content=sum(entry["bytes"] for entry in files.values()) <= CHECKSUM_LIMIT)


def _digest_written(path: Path) -> str:
    return _written.get(_state(path.stat())) or file_digest(path)


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return size and checksum of files in a folder, by name, as manifests hold them."""
    found = list(paths)
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256}
        for path, sha256 in zip(found, hash_files(found, _digest_written), strict=True)
    }


def changed_file(folder: Path, files: Mapping[str, Mapping[str, Any]], *, content: bool = True) -> str | None:
    """Describe the first file that differs from the list, by size and, if `content`, by checksum; None if none does."""
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return f"file {name} is missing or has another size"
    if content:
        # Read the files again, even if their digests are cached.
        found = hash_files([folder / name for name in files], lambda path: file_digest(path))
        changed = (name for name, sha256 in zip(files, found, strict=True) if sha256 != files[name]["sha256"])
        return next((f"file {name} has changed" for name in changed), None)
    return None


@dataclass
class Draft:
    """A folder being written; `counts` are stored in the manifest."""

    folder: Path
    counts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def publish(out_dir: Path, *, kind: str, inputs: dict[str, Any], settings: dict[str, Any]) -> Iterator[Draft]:
    """Write into `Draft.folder`; when the block ends without error the folder appears as `out_dir`."""
    with naming(out_dir):
        _repair(out_dir)
        partial = out_dir.with_name(out_dir.name + ".partial")
        remove(partial)
        partial.mkdir(parents=True)
        draft = Draft(partial)
        yield draft
        seal(partial, out_dir, kind=kind, inputs=inputs, settings=settings, counts=draft.counts)


def seal(
    partial: Path,
    out_dir: Path,
    *,
    kind: str,
    inputs: dict[str, Any],
    settings: dict[str, Any],
    counts: dict[str, Any],
    unlisted: Collection[str] = (),
) -> None:
    """Give a finished work folder its manifest and its final name.

    `unlisted` files and folders belong to the work, not to the result. They are deleted last, so that a kill before
    that loses no work.
    """
    for path in partial.rglob(f"*{ASIDE}"):  # left by a killed write
        path.unlink()
    found = [path for path in sorted(partial.rglob("*")) if path.is_file() and path.name != MANIFEST]
    files = list_files(partial, [path for path in found if path.relative_to(partial).parts[0] not in unlisted])
    manifest: dict[str, Any] = {
        "kind": kind,
        "format": FORMAT,
        "unspool": __version__,
        "inputs": inputs,
        "settings": settings,
        "counts": counts,
        "files": files,
    }
    # As JSON returns it: keys are strings.
    manifest["sha256"] = digest(json.loads(json.dumps(manifest, default=str)))
    write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True, default=str) + "\n")
    if out_dir.exists():
        # Two renames instead of delete and rename, so that `out_dir` is never a half-deleted folder.
        old = _old(out_dir)
        shutil.rmtree(old, ignore_errors=True)
        out_dir.rename(old)
        partial.rename(out_dir)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(out_dir)
    clean_up(out_dir, unlisted)


def clean_up(out_dir: Path, unlisted: Collection[str]) -> None:
    """Delete the files and folders that `seal` did not list."""
    for name in unlisted:
        remove(out_dir / name)
    delete_removed(out_dir)


def remove(path: Path) -> None:
    """Delete a file or folder, if it exists. A folder is first renamed to a name that nothing reads."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    renamed = path.with_name(f"{path.name}.{secrets.token_hex(4)}{REMOVED}")
    path.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def delete_removed(folder: Path) -> None:
    """Finish removals that a kill interrupted."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.endswith(REMOVED):
                shutil.rmtree(path, ignore_errors=True)


def _old(out_dir: Path) -> Path:
    return out_dir.with_name(out_dir.name + ".old")


def _repair(out_dir: Path) -> None:
    """Finish a replacement of `out_dir` that a kill interrupted between the two renames of `seal`.

    A draft with a manifest is complete and becomes `out_dir`; otherwise the old folder is restored.
    """
    delete_removed(out_dir.parent)
    old = _old(out_dir)
    if not old.is_dir():
        return
    if not out_dir.exists():
        draft = out_dir.with_name(out_dir.name + ".partial")
        (draft if (draft / MANIFEST).is_file() else old).rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def open_work(work: Path, key: str, *, label: str, describe: Callable[[Path], str | None], key_file: str = KEY) -> None:
    """Open `work`, the folder of unfinished work for `key`, a digest of inputs and settings.

    Unfinished work for another key is renamed to the suffix `.previous` and restored when its key is used again. Only
    one such folder is kept. `describe` returns how much a folder holds, or None for nothing; an empty one is deleted.
    """
    previous, swapped = (work.with_name(work.name + ending) for ending in (PREVIOUS, ".swap" + PREVIOUS))
    if swapped.exists():  # a kill interrupted the renames below
        swapped.rename(previous if work.exists() else work)
    if work.exists() and _read_key(work / key_file) != key:
        amount = describe(work)
        comes_back = _read_key(previous / key_file) == key
        if comes_back:
            previous.rename(swapped)
        if amount is None:
            remove(work)
        else:
            older = describe(previous) if previous.exists() else None
            replaced = f"; {older} of older work there is deleted" if older else ""
            remove(previous)
            work.rename(previous)
            logger.warning(
                f"{label}: not using the unfinished work in {work.name} ({amount}), because it was made with other "
                f"inputs or settings. It is kept as {previous.name}; change them back to resume it, or delete it"
                f"{replaced}"
            )
        if comes_back:
            swapped.rename(work)
    elif not work.exists() and _read_key(previous / key_file) == key:
        previous.rename(work)
    if _read_key(work / key_file) == key:
        return
    (work / key_file).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(work / key_file, key)


def _read_key(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def check_writable(path: Path, name: str) -> None:
    """Refuse a file that cannot be created, before the work whose result it will hold; `name` is the option."""
    folder = next(part for part in path.absolute().parents if part.exists())
    if not folder.is_dir():
        raise ConfigError(f"{name} {path}: {folder} is a file, not a folder; use another path.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{name} {path}: no permission to write into {folder}; use another path.")


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step, so that readers never see a partial file."""
    aside = path.with_name(path.name + ASIDE)
    with naming(path):
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise
