"""What a run's folder holds, and the command that looks further into each part."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from unspool.inspect.place import Box, boxes
from unspool.inspect.summary import show_length, strategies


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: str  # "corpus" or "rows"
    name: str
    count: int | None  # documents or rows; None if the manifest does not say
    tokens: int | None
    about: str
    command: str

    @property
    def unit(self) -> str:
        return "rows" if self.kind == "rows" else "documents"


def list_run(folder: Path, source: str | None) -> list[Entry]:
    """The corpora and rows of a run; with `source`, those that hold something of it."""
    return [_entry(box) for box in boxes(folder) if source is None or source in box.sources]


def sources_of(folder: Path) -> list[str]:
    return sorted({name for box in boxes(folder) for name in box.sources})


def _entry(box: Box) -> Entry:
    count = box.counts.get("rows" if box.kind == "rows" else "documents")
    tokens = box.counts.get("tokens")
    return Entry(
        kind=box.kind,
        name=box.folder.name,
        count=count if isinstance(count, int) else None,
        tokens=tokens if isinstance(tokens, int) else None,
        about=_about(box),
        command=f"unspool look {shlex.quote(str(box.folder))}",
    )


def _about(box: Box) -> str:
    if box.kind == "corpus":
        return f"kind: {box.settings['kind']}" if box.settings.get("kind") else ""
    length = box.settings.get("length")
    parts = [
        show_length(length) if isinstance(length, int) else "",
        *strategies(box.settings),
        f"from {', '.join(box.sources)}" if box.sources else "",
    ]
    return ", ".join(part for part in parts if part)
