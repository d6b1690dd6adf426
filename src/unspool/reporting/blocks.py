"""What a page consists of, before it is HTML or Markdown: sections of blocks.

Promise: both are written from these, so that they say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from unspool.reporting.figures import Figure, Table

Legend = list[tuple[str, int]]  # (label, style)


@dataclass(frozen=True, kw_only=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    role: str = "sub"  # or "note" (look here), "missing"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Charts with their legend, and tables, beside each other where there is room."""

    kind: ClassVar[str] = "group"
    title: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    legend: Legend = field(default_factory=list)
    keys: tuple[str, str] | None = None  # what the two bars of a pair mean
    wide: bool = False  # one below the other
    small: bool = False  # three beside each other
    folded: str = ""  # what stands on the fold, where the block is not to be open


@dataclass(frozen=True, kw_only=True)
class Heat:
    """One heatmap per model."""

    kind: ClassVar[str] = "heat"
    title: str
    note: str
    old_context: str
    figures: Sequence[tuple[int, Figure]]
    folded: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    model: str
    style: int
    mark: str
    output: str


@dataclass(frozen=True, kw_only=True)
class Question:
    place: str
    reference: str
    answers: Sequence[Answer]
    prompt: str = ""


@dataclass(frozen=True, kw_only=True)
class Questions:
    kind: ClassVar[str] = "asked"
    title: str
    questions: Sequence[Question]


@dataclass(frozen=True, kw_only=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str
    label: str
    folded: str = ""


Block = Text | Group | Heat | Questions | Code


@dataclass(frozen=True, kw_only=True)
class Section:
    anchor: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class TileRow:
    model: str
    style: int
    value: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    title: str
    note: str
    rows: Sequence[TileRow]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Everything that is printed of one run."""

    anchor: str
    name: str
    contexts: str
    base_model: str
    lines: Sequence[str]
    notes: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]


@dataclass(frozen=True, kw_only=True)
class PageView:
    title: str
    runs: Sequence[RunView]
    together: Section | None  # all runs at once
    version: str
