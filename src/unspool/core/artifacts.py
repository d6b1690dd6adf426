"""Artifacts: folders that are published complete or not at all, each with a `manifest.json`.

A folder with a manifest is complete; unfinished work is beside it under a `.partial` name. A rerun skips a folder whose
manifest matches its inputs and settings. A kill while a folder is replaced loses neither the old nor the new one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool import __version__
from unspool.core.errors import naming

MANIFEST = "manifest.json"
# Increased when the meaning of files changes, so that older folders are rebuilt.
FORMAT = 1
# Up to this size a rerun also compares checksums; above, only names and sizes, so that skipping a terabyte is instant.
CHECKSUM_LIMIT = 256 << 20


def digest(value: Any) -> str:
    """Hash of any JSON-able value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_digest(folder: Path) -> str:
    """Hash of every file in a folder: names and contents."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest({str(path.relative_to(folder)): file_digest(path) for path in files})


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
    return _damage(folder, manifest)


def _damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    files: dict[str, dict[str, Any]] = manifest.get("files", {})
    check_content = sum(entry["bytes"] for entry in files.values()) <= CHECKSUM_LIMIT
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return f"file {name} is missing or has another size"
        if check_content and file_digest(path) != entry["sha256"]:
            return f"file {name} has changed"
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
        shutil.rmtree(partial, ignore_errors=True)
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
) -> None:
    """Give a finished work folder its manifest and its final name."""
    files = {
        str(path.relative_to(partial)): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(partial.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {
        "kind": kind,
        "format": FORMAT,
        "unspool": __version__,
        "inputs": inputs,
        "settings": settings,
        "counts": counts,
        "files": files,
    }
    write_atomic(partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True, default=str) + "\n")
    if out_dir.exists():
        # Two renames instead of delete and rename: a half-deleted folder is never in place.
        old = _old(out_dir)
        shutil.rmtree(old, ignore_errors=True)
        out_dir.rename(old)
        partial.rename(out_dir)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(out_dir)


def _old(out_dir: Path) -> Path:
    return out_dir.with_name(out_dir.name + ".old")


def _repair(out_dir: Path) -> None:
    """Finish a replacement of `out_dir` that was killed between the two renames of `seal`.

    A draft with a manifest is complete and becomes `out_dir`; otherwise the old folder is restored.
    """
    old = _old(out_dir)
    if not old.is_dir():
        return
    if not out_dir.exists():
        draft = out_dir.with_name(out_dir.name + ".partial")
        (draft if (draft / MANIFEST).is_file() else old).rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step, so that readers never see a part of it."""
    aside = path.with_name(path.name + ".tmp")
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
