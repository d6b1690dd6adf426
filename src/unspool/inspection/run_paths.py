"""What a path holds that can be looked at: a run, a corpus, rows, or a plain input file.

Promise: only names and manifests are read, so this answers at once; what cannot be shown is refused with
one sentence that says what can be.
Elsewhere: opening the files (rows.py, corpus.py, records.py).
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from unspool.core.artifacts import read_manifest
from unspool.core.config import nearest
from unspool.core.errors import ConfigError, DataError
from unspool.inspection.dataset_summary import show_length, strategies

Kind = Literal["run", "dataset", "corpus", "records"]
# How the Arrow files of each kind of folder begin.
PREFIXES: dict[str, Kind] = {"rows-": "dataset", "docs-": "corpus"}
# What `unspool synth` writes.
TALKS = "conversations-*.jsonl.zst"
WHAT_CAN_BE_SEEN = (
    "a run's folder, a folder of its corpus/, datasets/ or synth/, a rows-*.arrow or docs-*.arrow file, "
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
        return _dict(_dict(self.manifest.get("settings")).get("dataset" if self.kind == "dataset" else "source"))

    @property
    def sources(self) -> list[str]:
        given = self.settings.get("from") if self.kind == "dataset" else self.folder.name
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
    for pattern in ("corpus/*", "datasets/*", "*"):
        for inner in sorted(folder.glob(pattern)):
            # Work in progress and what is being replaced are never results.
            if inner.suffix in (".partial", ".work", ".old") or not inner.is_dir():
                continue
            manifest = read_manifest(inner) or {}
            if manifest.get("kind") in ("corpus", "dataset"):
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


# Whether Arrow files can be read without harm.


def check_files(paths: Sequence[Path]) -> None:
    """DataError for a file that is cut short or whose lists point outside of it."""
    for path in paths:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as file:
                for number in range(file.num_record_batches):
                    file.get_batch(number).validate(full=True)
        except (OSError, ValueError, pa.ArrowException) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(
                f"{path}: not a complete Arrow file ({reason}); delete its folder and run again."
            ) from error


# What a run's folder holds, and the command that looks further into each part.


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: str  # "corpus" or "dataset"
    name: str
    count: int | None  # documents or rows; None if the manifest does not say
    tokens: int | None
    about: str
    command: str

    @property
    def unit(self) -> str:
        return "rows" if self.kind == "dataset" else "documents"


def list_run(folder: Path, source: str | None) -> list[Entry]:
    """The corpora and rows of a run; with `source`, those that hold something of it."""
    return [_entry(box) for box in boxes(folder) if source is None or source in box.sources]


def sources_of(folder: Path) -> list[str]:
    return sorted({name for box in boxes(folder) for name in box.sources})


def _entry(box: Box) -> Entry:
    count = box.counts.get("rows" if box.kind == "dataset" else "documents")
    tokens = box.counts.get("tokens")
    return Entry(
        kind=box.kind,
        name=box.folder.name,
        count=count if isinstance(count, int) else None,
        tokens=tokens if isinstance(tokens, int) else None,
        about=_about(box),
        command=f"unspool inspect {shlex.quote(str(box.folder))}",
    )


def _about(box: Box) -> str:
    if box.kind == "corpus":
        return f"kind: {box.settings['kind']}" if box.settings.get("kind") else ""
    length = box.settings.get("seq_len")
    parts = [
        show_length(length) if isinstance(length, int) else "",
        *strategies(box.settings),
        f"from {', '.join(box.sources)}" if box.sources else "",
    ]
    return ", ".join(part for part in parts if part)
