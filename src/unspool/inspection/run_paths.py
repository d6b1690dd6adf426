"""Detect what a path holds: a run, a corpus, a dataset, or an input file.

Only names and manifests are read, so this is fast. For other paths, the error lists the accepted ones.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from unspool.core.artifacts import WORK_ENDINGS, read_manifest
from unspool.core.config import nearest
from unspool.core.errors import ConfigError, DataError
from unspool.core.sizes import format_size
from unspool.data.packing.describe import summarize_packing

Kind = Literal["run", "dataset", "corpus", "document_scores", "records"]
# Prefixes of the Arrow files of each kind of folder.
PREFIXES: dict[str, Kind] = {"rows-": "dataset", "docs-": "corpus", "scores-": "document_scores"}
# Files that `unspool synth` writes.
CONVERSATIONS = "conversations-*.jsonl.zst"
ACCEPTED_PATHS = (
    "a run's folder, a folder of its corpus/, datasets/, document_scores/ or synth/, a rows-*.arrow or docs-*.arrow "
    "file, or an input file such as books.jsonl or book.txt"
)


@dataclass(frozen=True, kw_only=True)
class PublishedFolder:
    """A published corpus or dataset with its manifest."""

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
        """Return the recipe's settings of this dataset, or of the corpus's source."""
        return _dict(_dict(self.manifest.get("settings")).get("dataset" if self.kind == "dataset" else "source"))

    @property
    def sources(self) -> list[str]:
        given = self.settings.get("from") if self.kind == "dataset" else self.folder.name
        return list(given) if isinstance(given, dict) else [str(given)] if given else []


@dataclass(frozen=True, kw_only=True)
class DataPath:
    """A path that can be inspected, with the files to open."""

    path: Path
    kind: Kind
    files: list[Path]  # in order
    manifest: dict[str, Any]  # empty if there is none
    run_dir: Path | None  # folder of its run

    @property
    def counts(self) -> dict[str, Any]:
        return _dict(self.manifest.get("counts"))

    @property
    def settings(self) -> dict[str, Any]:
        return _dict(self.manifest.get("settings"))

    @property
    def notes(self) -> list[str]:
        return [] if self.manifest else ["No manifest.json: the folder is unfinished or was not made by Unspool."]


def find_data(path: Path) -> DataPath:
    """Detect what `path` is; ConfigError if it cannot be inspected."""
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _file(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be opened ({error.strerror}); correct the path or its permissions."
        ) from error
    beside = path.parent if path.parent.is_dir() else None
    guess = nearest(path.name, [other.name for other in beside.iterdir()]) if beside else None
    hint = f"did you mean {path.with_name(guess)}?" if guess else f"give {ACCEPTED_PATHS}."
    raise ConfigError(f"{path}: no such file or folder; {hint}")


def published_folders(folder: Path) -> list[PublishedFolder]:
    """Find the published corpora, scores and datasets in a run's folder, or directly in `folder`."""
    found = []
    for pattern in ("corpus/*", "document_scores/*", "datasets/*", "*"):
        for inner in sorted(folder.glob(pattern)):
            # Unfinished folders, and those being replaced, are not results.
            if inner.name.endswith(WORK_ENDINGS) or not inner.is_dir():
                continue
            manifest = read_manifest(inner) or {}
            if manifest.get("kind") in PREFIXES.values():
                found.append(PublishedFolder(folder=inner, manifest=manifest))
    return found


def _folder(path: Path) -> DataPath:
    manifest = read_manifest(path) or {}
    for prefix, kind in PREFIXES.items():
        files = sorted(path.glob(f"{prefix}*.arrow"))
        if files:
            return DataPath(path=path, kind=kind, files=files, manifest=manifest, run_dir=_run_of(path))
    conversations = sorted(path.glob(CONVERSATIONS))
    if conversations:
        return DataPath(path=path, kind="records", files=conversations, manifest=manifest, run_dir=_run_of(path))
    if published_folders(path):
        return DataPath(path=path, kind="run", files=[], manifest={}, run_dir=path)
    if not any(path.iterdir()):
        raise ConfigError(f"{path}: the folder is empty; give {ACCEPTED_PATHS}.")
    if manifest.get("kind") in PREFIXES.values():
        raise ConfigError(f"{path}: it has a manifest but no Arrow files; run the recipe again.")
    raise ConfigError(f"{path}: no documents or rows found; give {ACCEPTED_PATHS}.")


def _file(path: Path) -> DataPath:
    if path.suffix != ".arrow":
        return DataPath(path=path, kind="records", files=[path], manifest={}, run_dir=None)
    for prefix, kind in PREFIXES.items():
        if path.name.startswith(prefix):
            folder = path.absolute().parent
            manifest = read_manifest(folder) or {}
            return DataPath(path=path, kind=kind, files=[path], manifest=manifest, run_dir=_run_of(folder))
    raise ConfigError(f"{path}: Arrow files must be named rows-*.arrow or docs-*.arrow.")


def _run_of(folder: Path) -> Path | None:
    run_dir = folder.absolute().parent.parent
    return run_dir if any((run_dir / name).is_file() for name in ("recipe.yaml", "run.json")) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def check_files(paths: Sequence[Path]) -> None:
    """Raise DataError for a truncated file, or one whose offsets point outside the file."""
    for path in paths:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as file:
                for number in range(file.num_record_batches):
                    file.get_batch(number).validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(
                f"{path}: not a complete Arrow file ({reason}); delete its folder and run the same command again."
            ) from error


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: str  # "corpus", "scores" or "dataset"
    name: str
    count: int | None  # documents or rows; None if not in the manifest
    tokens: int | None
    about: str
    command: str

    @property
    def unit(self) -> str:
        return "rows" if self.kind == "dataset" else "documents"


def list_run(folder: Path, source: str | None) -> list[Entry]:
    """List the corpora and datasets of a run; with `source`, only those that contain it."""
    return [_entry(one) for one in published_folders(folder) if source is None or source in one.sources]


def sources_of(folder: Path) -> list[str]:
    return sorted({name for published in published_folders(folder) for name in published.sources})


def _entry(published: PublishedFolder) -> Entry:
    count = published.counts.get("rows" if published.kind == "dataset" else "documents")
    tokens = published.counts.get("tokens")
    return Entry(
        kind="scores" if published.kind == "document_scores" else published.kind,
        name=published.folder.name,
        count=count if isinstance(count, int) else None,
        tokens=tokens if isinstance(tokens, int) else None,
        about=_about(published),
        command=f"unspool inspect {shlex.quote(str(published.folder))}",
    )


def _about(published: PublishedFolder) -> str:
    if published.kind == "corpus":
        return f"kind: {published.settings['kind']}" if published.settings.get("kind") else ""
    if published.kind == "document_scores":
        return "best and worst documents"
    length = published.settings.get("seq_len")
    parts = [
        f"{format_size(length)} tokens" if isinstance(length, int) else "",
        *summarize_packing(published.settings),
        f"from {', '.join(published.sources)}" if published.sources else "",
    ]
    return ", ".join(part for part in parts if part)
