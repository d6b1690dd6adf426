"""Which numbers go into which chart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from unspool.base.sizes import format_size
from unspool.report.charts import Frame, HeatCell, Heatmap, Point, Series, heatmap, line_chart
from unspool.report.results import Cell, ModelScores, RunResults
from unspool.report.wording import MISSING, listing, show_full, show_n, show_percent, show_span, suite_title

MAX_TICKS = 8
# More points than a chart has pixels only make the page heavy.
MAX_CURVE_POINTS = 300
MAX_DOTS = 40


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model in a chart; runs side by side bring models of one name, told apart by the label."""

    label: str
    style: int
    scores: ModelScores
    context: int | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    title: str
    note: str
    drawing: Markup


def describe(label: str, cell: Cell) -> str:
    """A tooltip: everything known about one number."""
    if cell.start is not None and cell.stop is not None:
        place = f"positions {show_span(cell.start, cell.stop)}"
    else:
        place = format_size(cell.length) + (f", depth {show_percent(cell.depth)}" if cell.depth is not None else "")
    known = f"{show_full(cell)}, {show_n(cell)}" if cell.value is not None else f"{MISSING} (nothing was scored)"
    return f"{label}, {place}: {known}"


def recall_figure(lines: Sequence[Line], suite: str, original_context: int | None) -> Figure:
    """Recall by length, all depths together, with intervals."""
    lengths = sorted({cell.length for line in lines for cell in line.scores.cells if cell.suite == suite})
    series = []
    for line in lines:
        cells = [line.scores.recall(suite, length) for length in lengths]
        points = [_point(line.label, cell, cell.length) for cell in cells if cell is not None]
        series.append(Series(label=line.label, style=line.style, points=points))
    title = f"{suite_title(suite)} by length"
    frame = Frame(
        label=f"{title}, one line per model; the same numbers are in the table “All numbers”.",
        x_title="prompt length (tokens)",
        x_ticks=_thin([(float(length), format_size(length)) for length in lengths]),
        show_y=lambda value: f"{100 * value:.0f}%",
        log_x=True,
        y_range=(0.0, 1.0),
        mark=_old_context(original_context),
    )
    return Figure(title=title, note=f"{score_kind(suite)}, 95% intervals", drawing=line_chart(series, frame))


def score_kind(suite: str) -> str:
    """What a score is the mean of: these two suites know right and wrong only."""
    return "share of right answers" if suite in ("niah", "kv") else "mean score"


def loss_figure(lines: Sequence[Line], original_context: int | None) -> Figure:
    """Loss by position, one point per bucket of positions."""
    series, edges = [], set[int]()
    for line in lines:
        cells = line.scores.losses()
        edges |= {edge for cell in cells for edge in (cell.start, cell.stop) if edge}
        points = [_point(line.label, cell, _middle(cell)) for cell in cells]
        series.append(Series(label=line.label, style=line.style, points=points))
    frame = Frame(
        label="Loss by position, one line per model; the same numbers are in the table beside it.",
        x_title="position in the text (tokens, log scale)",
        x_ticks=_thin([(float(edge), format_size(edge)) for edge in sorted(edges)]),
        show_y=lambda value: f"{value:g}",
        log_x=True,
        mark=_old_context(original_context),
    )
    windows = listing(
        [format_size(length) for length in sorted({c.length for line in lines for c in line.scores.losses()})]
    )
    note = f"nats per token on held-out text, windows of {windows}, 95% intervals; lower is better"
    return Figure(title="Loss by position", note=note, drawing=line_chart(series, frame))


def _point(label: str, cell: Cell, x: float) -> Point:
    return Point(x=x, y=cell.value, low=cell.low, high=cell.high, tooltip=describe(label, cell))


def _middle(cell: Cell) -> float:
    """The middle of a bucket on a log axis; the first, which starts at 0, is drawn as its upper half."""
    start, stop = cell.start or 0, cell.stop or 1
    return math.sqrt(max(start, stop / 2) * stop)


def _old_context(original_context: int | None) -> tuple[float, str] | None:
    return (float(original_context), f"old context {format_size(original_context)}") if original_context else None


def _thin(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Every second or third label, counted from the last, which is the one that matters."""
    stride = math.ceil(len(ticks) / MAX_TICKS) or 1
    return ticks[::-1][::stride][::-1]


def heat_figure(results: RunResults, model: ModelScores, suite: str) -> Figure:
    """Recall by length and depth, with all depths together in the last row."""
    lengths = results.lengths(suite)
    depths: list[float | None] = [*results.depths(suite), None]
    cells = [[_heat_cell(model, suite, length, depth) for length in lengths] for depth in depths]
    old = results.original_context
    inside = sum(length <= old for length in lengths) if old else 0
    panel = Heatmap(
        label=f"{suite_title(suite)} of {model.name} by length and depth; the same numbers are in “All numbers”.",
        columns=[format_size(length) for length in lengths],
        rows=["all" if depth is None else show_percent(depth) for depth in depths],
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
    return HeatCell(value=cell.value, text=show_percent(cell.value)[:-1], tooltip=describe(model.name, cell))
