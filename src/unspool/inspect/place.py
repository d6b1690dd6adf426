"""What a path holds that can be looked at: a run, a corpus, rows, or a plain input file.

Promise: only names and manifests are read, so this answers at once; what cannot be shown is refused with
one sentence that says what can be.
Elsewhere: opening the files (rows.py, corpus.py, records.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unspool.base.artefact import read_manifest
from unspool.base.errors import ConfigError
from unspool.base.lookup import nearest

Kind = Literal["run", "rows", "corpus", "records"]
# How the Arrow files of each kind of folder begin.
PREFIXES: dict[str, Kind] = {"rows-": "rows", "docs-": "corpus"}
# What `unspool synth` writes.
TALKS = "conversations-*.jsonl.zst"
WHAT_CAN_BE_SEEN = (
    "a run's folder, a folder of its corpus/, rows/ or synth/, a rows-*.arrow or docs-*.arrow file, "
    "or an input file such as books.jsonl"
)


@dataclass(frozen=True, kw_only=True)
class Box:
    """A finished corpus or rows folder, as its manifest describes it."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def counts(self) -> dict[str, Any]:
        return _dict(self.manifest.get("counts"))

    @property
    def settings(self) -> dict[str, Any]:
        """What the recipe says of these rows or of this corpus' source."""
        return _dict(_dict(self.manifest.get("settings")).get("rows" if self.kind == "rows" else "source"))

    @property
    def sources(self) -> list[str]:
        given = self.settings.get("from") if self.kind == "rows" else self.folder.name
        return list(given) if isinstance(given, dict) else [str(given)] if given else []


@dataclass(frozen=True, kw_only=True)
class Place:
    path: Path
    kind: Kind
    files: list[Path]  # what to open, in order
    manifest: dict[str, Any]  # empty where there is none
    run_dir: Path | None  # the folder of the run that made it

    @property
    def counts(self) -> dict[str, Any]:
        return _dict(self.manifest.get("counts"))

    @property
    def settings(self) -> dict[str, Any]:
        return _dict(self.manifest.get("settings"))


def find_place(path: Path) -> Place:
    """What `path` is; ConfigError if there is nothing in it to look at."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be opened ({error.strerror}).") from error
    beside = path.parent if path.parent.is_dir() else None
    guess = nearest(path.name, [other.name for other in beside.iterdir()]) if beside else None
    hint = f"did you mean {path.with_name(guess)}?" if guess else f"give {WHAT_CAN_BE_SEEN}."
    raise ConfigError(f"{path}: no such file or folder; {hint}")


def boxes(folder: Path) -> list[Box]:
    """The finished corpora and rows in a run's folder, or directly in `folder`."""
    found = []
    for pattern in ("corpus/*", "rows/*", "*"):
        for inner in sorted(folder.glob(pattern)):
            # Work in progress and what is being replaced are never results.
            if inner.suffix in (".partial", ".work", ".old") or not inner.is_dir():
                continue
            manifest = read_manifest(inner) or {}
            if manifest.get("kind") in ("corpus", "rows"):
                found.append(Box(folder=inner, manifest=manifest))
    return found


def _folder(path: Path) -> Place:
    for prefix, kind in PREFIXES.items():
        files = sorted(path.glob(f"{prefix}*.arrow"))
        if files:
            return Place(path=path, kind=kind, files=files, manifest=read_manifest(path) or {}, run_dir=_run_of(path))
    talks = sorted(path.glob(TALKS))
    if talks:
        return Place(path=path, kind="records", files=talks, manifest=read_manifest(path) or {}, run_dir=_run_of(path))
    if boxes(path):
        return Place(path=path, kind="run", files=[], manifest={}, run_dir=path)
    if not any(path.iterdir()):
        raise ConfigError(f"{path}: the folder is empty; give {WHAT_CAN_BE_SEEN}.")
    if (read_manifest(path) or {}).get("kind") in PREFIXES.values():
        raise ConfigError(f"{path}: its manifest is there, but none of its Arrow files; run the recipe again.")
    raise ConfigError(f"{path}: holds neither documents nor rows; give {WHAT_CAN_BE_SEEN}.")


def _file(path: Path) -> Place:
    if path.suffix != ".arrow":
        return Place(path=path, kind="records", files=[path], manifest={}, run_dir=None)
    for prefix, kind in PREFIXES.items():
        if path.name.startswith(prefix):
            folder = path.absolute().parent
            manifest = read_manifest(folder) or {}
            return Place(path=path, kind=kind, files=[path], manifest=manifest, run_dir=_run_of(folder))
    raise ConfigError(f"{path}: Arrow files are known by their names, rows-*.arrow or docs-*.arrow; this is neither.")


def _run_of(folder: Path) -> Path | None:
    run_dir = folder.absolute().parent.parent
    return run_dir if any((run_dir / name).is_file() for name in ("recipe.yaml", "run.json")) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
