"""Charts and tables of scores (recall by length and depth, loss by position), and tables of provenance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.core.charts import Figure, Frame, HeatCell, Heatmap, Point, Series, heatmap, line_chart
from unspool.core.formatting import MISSING, clip, format_bytes, format_duration, format_percent, join_words
from unspool.core.sizes import format_size
from unspool.core.table import Entry, Table, entries
from unspool.evals.beyond_context import DONE
from unspool.reporting.measures import (
    format_interval,
    format_n,
    format_positions,
    format_value,
    format_with_interval,
    trusted_range,
)
from unspool.reporting.run_results import Artifact, Cell, ModelScores, RunResults
from unspool.reporting.suite_titles import measure_of, suite_title

MAX_TICKS = 8


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model in charts and tables. Labels are unique across runs."""

    label: str
    style: int
    scores: ModelScores
    context: int | None = None


def describe(label: str, cell: Cell) -> str:
    """Tooltip of one number."""
    if cell.start is not None and cell.stop is not None:
        place = f"positions {format_positions(cell.start, cell.stop)}"
    else:
        place = format_size(cell.length) + (f", depth {format_percent(cell.depth)}" if cell.depth is not None else "")
    known = f"{format_with_interval(cell)}, {format_n(cell)}" if cell.value is not None else f"{MISSING} (not scored)"
    done = DONE.get(cell.beyond_context or "")
    return f"{label}, {place}: {known}" + (f"; beyond the model's context, {done}" if done else "")


def recall_figure(lines: Sequence[Line], suite: str, original_context: int | None) -> Figure:
    """Draw recall by length over all depths, with intervals."""
    lengths = sorted({cell.length for line in lines for cell in line.scores.cells if cell.suite == suite})
    series = []
    for line in lines:
        cells = [line.scores.recall(suite, length) for length in lengths]
        points = [_point(line.label, cell, cell.length) for cell in cells if cell is not None]
        series.append(Series(label=line.label, style=line.style, points=points))
    title = f"{suite_title(suite)} by length"
    frame = Frame(
        label=f"{title}, one line per model; the table “All numbers” has the same numbers.",
        x_title="prompt length (tokens)",
        x_ticks=thin_ticks([(float(length), format_size(length)) for length in lengths]),
        show_y=lambda value: f"{100 * value:.0f}%",
        log_x=True,
        y_range=(0.0, 1.0),
        mark=context_mark(original_context),
    )
    return Figure(title=title, note=f"{score_kind(suite)}, 95% intervals", drawing=line_chart(series, frame))


def score_kind(suite: str) -> str:
    """What a suite's mean score measures."""
    return "share of correct answers" if measure_of(suite) == "accuracy" else "mean score"


def loss_figure(lines: Sequence[Line], original_context: int | None) -> Figure:
    """Draw loss by position, one point per bucket of positions."""
    series, edges = [], set[int]()
    for line in lines:
        cells = line.scores.losses()
        edges |= {edge for cell in cells for edge in (cell.start, cell.stop) if edge}
        points = [_point(line.label, cell, _middle(cell)) for cell in cells]
        series.append(Series(label=line.label, style=line.style, points=points))
    frame = Frame(
        label="Loss by position, one line per model; the table next to it has the same numbers.",
        x_title="position in the text (tokens, log scale)",
        x_ticks=thin_ticks([(float(edge), format_size(edge)) for edge in sorted(edges)]),
        show_y=lambda value: f"{value:g}",
        log_x=True,
        mark=context_mark(original_context),
    )
    windows = join_words(
        [format_size(length) for length in sorted({c.length for line in lines for c in line.scores.losses()})]
    )
    note = f"nats per token on held-out text, windows of {windows} tokens, 95% intervals; lower is better"
    return Figure(title="Loss by position", note=note, drawing=line_chart(series, frame))


def _point(label: str, cell: Cell, x: float) -> Point:
    return Point(x=x, y=cell.value, low=cell.low, high=cell.high, tooltip=describe(label, cell))


def _middle(cell: Cell) -> float:
    """Middle of a bucket on a log axis. The first bucket starts at 0, so only its upper half is used."""
    start, stop = cell.start or 0, cell.stop or 1
    return math.sqrt(max(start, stop / 2) * stop)


def context_mark(original_context: int | None) -> tuple[float, str] | None:
    """A vertical line at the original context length."""
    return (float(original_context), f"original context {format_size(original_context)}") if original_context else None


def thin_ticks(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Thin out the labels from the end, so that the last one is always kept."""
    stride = math.ceil(len(ticks) / MAX_TICKS) or 1
    return ticks[::-1][::stride][::-1]


def heat_figure(results: RunResults, model: ModelScores, suite: str) -> Figure:
    """Draw recall by length and depth. The last row averages all depths."""
    lengths = results.lengths(suite)
    depths: list[float | None] = [*results.depths(suite), None]
    cells = [[_heat_cell(model, suite, length, depth) for length in lengths] for depth in depths]
    old = results.original_context
    inside = sum(length <= old for length in lengths) if old else 0
    panel = Heatmap(
        label=f"{suite_title(suite)} of {model.name} by length and depth; “All numbers” has the same numbers.",
        columns=[format_size(length) for length in lengths],
        rows=["all" if depth is None else format_percent(depth) for depth in depths],
        cells=cells,
        x_title="prompt length (tokens)",
        y_title="depth",
        mark_after=inside if 0 < inside < len(lengths) else None,
        total_row=True,
    )
    return Figure(title=model.name, note="", drawing=heatmap(panel))


def _heat_cell(model: ModelScores, suite: str, length: int, depth: float | None) -> HeatCell:
    cell = model.recall(suite, length, depth)
    if cell is None or cell.value is None:
        return HeatCell(value=None, text=MISSING, tooltip=f"{model.name}, {format_size(length)}: not scored")
    return HeatCell(value=cell.value, text=format_percent(cell.value)[:-1], tooltip=describe(model.name, cell))


def number_entry(label: str, cell: Cell | None, *, tooltip: bool = True) -> Entry:
    if cell is None:
        return Entry(text=MISSING)
    return Entry(
        text=format_value(cell) + (" †" if cell.beyond_context else ""),
        note=format_interval(cell),
        tooltip=describe(label, cell) if tooltip else "",
        range=trusted_range(cell),
    )


def _number_row(
    place: str, lines: Sequence[Line], cells: Sequence[Cell | None], *, tooltips: bool = True
) -> list[Entry]:
    """One row of numbers. The last column is n, written once if all models have the same n."""
    numbers = [number_entry(line.label, cell, tooltip=tooltips) for line, cell in zip(lines, cells, strict=True)]
    counts = [MISSING if cell is None else f"{cell.n:,}" for cell in cells]
    together = counts[0] if len(set(counts)) == 1 else " / ".join(counts)
    return [Entry(text=place), *numbers, Entry(text=together)]


def loss_table(lines: Sequence[Line]) -> Table:
    spans = sorted({(cell.start or 0, cell.stop or 0) for line in lines for cell in line.scores.losses()})
    rows = []
    for span in spans:
        of_span = [next((c for c in line.scores.losses() if (c.start, c.stop) == span), None) for line in lines]
        rows.append(_number_row(format_positions(*span), lines, of_span))
    return Table(caption="Loss by position", columns=["positions", *(line.label for line in lines), "n"], rows=rows)


def recall_table(lines: Sequence[Line], suite: str, depths: Sequence[float | None]) -> Table:
    cells = [cell for line in lines for cell in line.scores.cells if cell.suite == suite]
    by_depth = any(depth is not None for depth in depths)
    rows = []
    for length in sorted({cell.length for cell in cells}):
        for depth in depths:
            found = [line.scores.recall(suite, length, depth) for line in lines]
            place = format_size(length) + ("" if depth is None else f" · {format_percent(depth)}")
            # Tables by depth are long, and their tooltips would only repeat the cells.
            rows.append(_number_row(place, lines, found, tooltips=not by_depth))
    caption = f"{suite_title(suite)} by length" + (" and depth" if by_depth else "")
    first = "length · depth" if by_depth else "length"
    return Table(caption=caption, columns=[first, *(line.label for line in lines), "n"], rows=rows)


def artifact_table(artifacts: Sequence[Artifact]) -> Table:
    rows = []
    for artifact in artifacts:
        inputs = ", ".join(f"{name} {_short(value)}" for name, value in artifact.inputs.items())
        rows.append(
            [
                *entries(artifact.path, artifact.version, f"{artifact.num_files:,}", format_bytes(artifact.num_bytes)),
                Entry(text=_short(artifact.content_hash), tooltip=artifact.content_hash),
                Entry(text=inputs or MISSING, tooltip=str(artifact.inputs) if inputs else ""),
            ]
        )
    columns = ["folder", "unspool", "files", "size", "content hash", "made from"]
    return Table(caption="Folders and their hashes", columns=columns, rows=rows, numeric=False)


def _short(value: Any) -> str:
    text = str(value)
    is_hash = len(text) >= 40 and all(letter in "0123456789abcdef" for letter in text)
    return text[:12] if is_hash else clip(text, 40)


def facts_table(results: RunResults) -> Table:
    facts = {"base model": results.base_model or MISSING, "folder": results.run_dir.name, **results.versions}
    rows = [entries(name, value) for name, value in facts.items()]
    return Table(caption="Model and versions", columns=["what", "value"], rows=rows, numeric=False)


def timing_table(results: RunResults) -> Table | None:
    if not results.seconds:
        return None
    rows = [entries(name, format_duration(seconds)) for name, seconds in results.seconds.items()]
    rows.append(entries("total", format_duration(sum(results.seconds.values()))))
    return Table(caption="Time", columns=["part", "time"], rows=rows)
