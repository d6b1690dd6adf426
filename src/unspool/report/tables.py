"""The tables of the page: plain rows of text, the accessible twin of every chart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.base.sizes import format_size
from unspool.report.figures import Line, describe
from unspool.report.results import Artefact, Cell, RunResults
from unspool.report.wording import (
    MISSING,
    show_bytes,
    show_duration,
    show_interval,
    show_percent,
    show_span,
    show_value,
    suite_title,
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table cell: the text, a smaller note after it, and a tooltip."""

    text: str
    note: str = ""
    tooltip: str = ""
    strong: bool = False
    rank: float | None = None  # what a column is compared by


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]  # the first entry of a row names it
    numeric: bool = True
    note: str = ""  # how to read it
    stacked: bool = False  # notes of cells below their texts, where there is much of both


def entries(*texts: str) -> list[Entry]:
    return [Entry(text=text) for text in texts]


def number_entry(label: str, cell: Cell | None, *, tooltip: bool = True) -> Entry:
    if cell is None:
        return Entry(text=MISSING)
    return Entry(
        text=show_value(cell),
        note=show_interval(cell),
        tooltip=describe(label, cell) if tooltip else "",
        rank=_rank(cell),
    )


def _rank(cell: Cell) -> float | None:
    """What is spelled the same ranks the same."""
    return None if cell.value is None else round(cell.value, 2)


def _number_row(
    place: str, lines: Sequence[Line], cells: Sequence[Cell | None], *, tooltips: bool = True
) -> list[Entry]:
    """The models' numbers at one place, with their n in the last column: once where they agree."""
    numbers = [number_entry(line.label, cell, tooltip=tooltips) for line, cell in zip(lines, cells, strict=True)]
    counts = [MISSING if cell is None else f"{cell.n:,}" for cell in cells]
    together = counts[0] if len(set(counts)) == 1 else " / ".join(counts)
    return [Entry(text=place), *numbers, Entry(text=together)]


def loss_table(lines: Sequence[Line]) -> Table:
    spans = sorted({(cell.start or 0, cell.stop or 0) for line in lines for cell in line.scores.losses()})
    rows = []
    for span in spans:
        of_span = [next((c for c in line.scores.losses() if (c.start, c.stop) == span), None) for line in lines]
        rows.append(_number_row(show_span(*span), lines, of_span))
    return Table(caption="Loss by position", columns=["positions", *(line.label for line in lines), "n"], rows=rows)


def recall_table(lines: Sequence[Line], suite: str, depths: Sequence[float | None]) -> Table:
    cells = [cell for line in lines for cell in line.scores.cells if cell.suite == suite]
    by_depth = any(depth is not None for depth in depths)
    rows = []
    for length in sorted({cell.length for cell in cells}):
        for depth in depths:
            found = [line.scores.recall(suite, length, depth) for line in lines]
            place = format_size(length) + ("" if depth is None else f" · {show_percent(depth)}")
            # There are many of these, and a tooltip would only say again what stands there.
            rows.append(_number_row(place, lines, found, tooltips=not by_depth))
    caption = f"{suite_title(suite)} by length" + (" and depth" if by_depth else "")
    first = "length · depth" if by_depth else "length"
    return Table(caption=caption, columns=[first, *(line.label for line in lines), "n"], rows=rows)


def artefact_table(artefacts: Sequence[Artefact]) -> Table:
    rows = []
    for artefact in artefacts:
        inputs = ", ".join(f"{name} {_short(value)}" for name, value in artefact.inputs.items())
        rows.append(
            [
                *entries(artefact.path, artefact.version, f"{artefact.num_files:,}", show_bytes(artefact.num_bytes)),
                Entry(text=_short(artefact.content_hash), tooltip=artefact.content_hash),
                Entry(text=inputs or MISSING, tooltip=str(artefact.inputs) if inputs else ""),
            ]
        )
    columns = ["folder", "unspool", "files", "size", "content hash", "made from"]
    return Table(caption="Folders and their hashes", columns=columns, rows=rows, numeric=False)


def _short(value: Any) -> str:
    text = str(value)
    is_hash = len(text) >= 40 and all(letter in "0123456789abcdef" for letter in text)
    return text[:12] if is_hash else text if len(text) <= 40 else text[:39] + "…"


def facts_table(results: RunResults) -> Table:
    facts = {"base model": results.base_model or MISSING, "folder": results.run_dir.name, **results.versions}
    rows = [entries(name, value) for name, value in facts.items()]
    return Table(caption="Model and versions", columns=["what", "value"], rows=rows, numeric=False)


def timing_table(results: RunResults) -> Table | None:
    if not results.seconds:
        return None
    rows = [entries(name, show_duration(seconds)) for name, seconds in results.seconds.items()]
    rows.append(entries("together", show_duration(sum(results.seconds.values()))))
    return Table(caption="Time", columns=["part", "time"], rows=rows)
