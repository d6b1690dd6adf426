"""The tables of the page: plain rows of text, the accessible twin of every chart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from unspool.base.sizes import format_count, format_size
from unspool.report.figures import Line, describe
from unspool.report.results import Artefact, Cell, RunResults, Stage
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


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]  # the first entry of a row names it
    numeric: bool = True


def _entries(*texts: str) -> list[Entry]:
    return [Entry(text=text) for text in texts]


def _number_entry(label: str, cell: Cell | None) -> Entry:
    if cell is None:
        return Entry(text=MISSING)
    return Entry(text=show_value(cell), note=show_interval(cell), tooltip=describe(label, cell))


def _number_row(place: str, lines: Sequence[Line], cells: Sequence[Cell | None]) -> list[Entry]:
    """The models' numbers at one place, with their n in the last column: once where they agree."""
    numbers = [_number_entry(line.label, cell) for line, cell in zip(lines, cells, strict=True)]
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
    rows = []
    for length in sorted({cell.length for cell in cells}):
        for depth in depths:
            found = [line.scores.recall(suite, length, depth) for line in lines]
            place = format_size(length) + ("" if depth is None else f" · {show_percent(depth)}")
            rows.append(_number_row(place, lines, found))
    by_depth = any(depth is not None for depth in depths)
    caption = f"{suite_title(suite)} by length" + (" and depth" if by_depth else "")
    first = "length · depth" if by_depth else "length"
    return Table(caption=caption, columns=[first, *(line.label for line in lines), "n"], rows=rows)


def training_table(results: RunResults) -> Table:
    columns = [
        "stage",
        "starts from",
        "context",
        "steps",
        "tokens",
        "tokens/s",
        "time",
        "last loss",
        "last loss by rows",
    ]
    rows = [_training_row(stage, results.seconds.get(f"stages/{stage.name}")) for stage in results.stages]
    return Table(caption="Stages", columns=columns, rows=rows)


def _training_row(stage: Stage, seconds: float | None) -> list[Entry]:
    speeds = [step.tokens_per_second for step in stage.steps if step.tokens_per_second is not None]
    tail = stage.steps[-max(1, len(stage.steps) // 10) :]
    broken = sum(step.loss is None for step in stage.steps)
    steps = f"{stage.steps[-1].step:,}" if stage.steps else MISSING
    names = sorted({name for step in tail for name in step.losses})
    by_rows = [f"{name} {_mean(step.losses.get(name) for step in tail)}" for name in names]
    return [
        Entry(text=stage.name, note="" if stage.finished else "in progress" if stage.steps else "not trained yet"),
        *_entries(stage.parent or "base model", format_size(stage.context) if stage.context else MISSING, steps),
        Entry(text=format_count(stage.tokens) if stage.steps else MISSING, tooltip=f"{stage.tokens:,} tokens"),
        Entry(text=format_count(median(speeds)) if speeds else MISSING, tooltip="median over steps"),
        Entry(text=show_duration(seconds) if seconds is not None else MISSING),
        Entry(
            text=_mean(step.loss for step in tail),
            note=f"without a finite loss: {broken:,} of {len(stage.steps):,} steps" if broken else "",
            tooltip=f"mean of the last {len(tail)} steps",
        ),
        *_entries(", ".join(by_rows) or MISSING),
    ]


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.2f}" if known else MISSING


# These counts come first, in this order; drops last, since they are spelled out by reason.
_COUNTS = ("documents", "rows", "tokens")
_DROPS = "dropped"
# Tables of their own, too large for a cell.
_DETAILS = {"sources", "lengths"}


def data_table(artefacts: Sequence[Artefact], group: str, caption: str) -> Table | None:
    """The counts of each folder under `group/`, as its manifest has them."""
    chosen = [artefact for artefact in artefacts if artefact.path.startswith(f"{group}/")]
    if not chosen:
        return None
    names = sorted({name for artefact in chosen for name in artefact.counts} - _DETAILS, key=_count_order)
    rows = []
    for artefact in chosen:
        numbers = [_show_count(artefact.counts.get(name)) for name in names]
        rows.append(_entries(artefact.path.removeprefix(f"{group}/"), *numbers))
    return Table(caption=caption, columns=["name", *(name.replace("_", " ") for name in names)], rows=rows)


def _count_order(name: str) -> tuple[int, str]:
    place = _COUNTS.index(name) if name in _COUNTS else len(_COUNTS)
    return (place + (name == _DROPS), name)


def _show_count(value: Any) -> str:
    """A count as people read it; `{"tail": 12, "short": 3}` becomes `tail 12, short 3`, a list its length."""
    if value is None:
        return MISSING
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show_count(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return f"{len(value)}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def artefact_table(artefacts: Sequence[Artefact]) -> Table:
    rows = []
    for artefact in artefacts:
        inputs = ", ".join(f"{name} {_short(value)}" for name, value in artefact.inputs.items())
        rows.append(
            [
                *_entries(artefact.path, artefact.version, f"{artefact.num_files:,}", show_bytes(artefact.num_bytes)),
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
    rows = [_entries(name, value) for name, value in facts.items()]
    return Table(caption="Model and versions", columns=["what", "value"], rows=rows, numeric=False)


def timing_table(results: RunResults) -> Table | None:
    if not results.seconds:
        return None
    rows = [_entries(name, show_duration(seconds)) for name, seconds in results.seconds.items()]
    rows.append(_entries("together", show_duration(sum(results.seconds.values()))))
    return Table(caption="Time", columns=["part", "time"], rows=rows)
