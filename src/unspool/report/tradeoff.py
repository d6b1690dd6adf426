"""Long against short: what a longer context cost where the context was short already.

In: models as lines of a chart. Out: one scatter per long measure, one point per model, and a table.
Promise: the short side is lm-eval's tasks where all points have them, else the loss inside the old context. Axes
point to the better side, up and to the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unspool.report.figures import Figure, Line
from unspool.report.measures import Measure, average
from unspool.report.results import LOSS, Cell
from unspool.report.scatter import Axis, Dot, Span, scatter
from unspool.report.tables import Entry, Table, number_entry
from unspool.report.wording import inside_sentence, show_full

MAX_FIGURES = 4


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    figures: list[Figure]
    table: Table


def trade_off(lines: Sequence[Line], measures: Sequence[Measure]) -> TradeOff | None:
    """None where fewer than two models have both sides."""
    short_title, short = _short_side(lines, measures)
    longs = [measure for measure in measures if not measure.title.startswith("Loss inside")]
    figures = []
    for measure in longs[:MAX_FIGURES]:
        both = [line for line in lines if _known(short.get(line.label)) and _known(measure.cells.get(line.label))]
        if len(both) > 1:
            figures.append(_figure(both, measure, short_title, short))
    if not figures:
        return None
    rows = [
        [
            Entry(text=line.label),
            number_entry(line.label, short.get(line.label)),
            *(number_entry(line.label, measure.cells.get(line.label)) for measure in longs),
        ]
        for line in lines
    ]
    columns = ["model", short_title, *(measure.title for measure in longs)]
    return TradeOff(figures=figures, table=Table(caption="Long against short", columns=columns, rows=rows))


def _short_side(lines: Sequence[Line], measures: Sequence[Measure]) -> tuple[str, dict[str, Cell | None]]:
    scored = [line for line in lines if line.scores.short]
    tasks = {cell.suite for line in scored for cell in line.scores.short}
    if len(scored) > 1:
        means = {line.label: average(list(line.scores.short)) for line in scored}
        same = {line.label: means[line.label] for line in scored if {c.suite for c in line.scores.short} == tasks}
        return f"Short tasks (mean of {len(tasks)})", dict(same)
    inside = next((measure for measure in measures if measure.title.startswith("Loss inside")), None)
    return (inside.title, dict(inside.cells)) if inside else ("Short context", {})


def _known(cell: Cell | None) -> bool:
    return cell is not None and cell.value is not None


def _figure(lines: Sequence[Line], measure: Measure, short_title: str, short: dict[str, Cell | None]) -> Figure:
    dots = []
    for line in lines:
        x, y = short[line.label], measure.cells[line.label]
        assert x is not None and y is not None, "only models with both sides come here"
        tooltip = f"{line.label}: {short_title} {show_full(x)}, {measure.title} {show_full(y)}"
        dots.append(Dot(label=line.label, style=line.style, x=_range(x), y=_range(y), tooltip=tooltip))
    axes = (_axis(short_title, short[lines[0].label]), _axis(measure.title, measure.cells[lines[0].label]))
    label = f"{measure.title} against {short_title}, one point per model; the same numbers are in the table below."
    return Figure(
        title=f"{measure.title} against {inside_sentence(short_title)}",
        note="better is up and to the right",
        drawing=scatter(dots, axes, label),
    )


def _range(cell: Cell) -> Span:
    assert cell.value is not None
    return Span(value=cell.value, low=cell.low, high=cell.high)


def _axis(title: str, cell: Cell | None) -> Axis:
    is_loss = cell is not None and cell.suite == LOSS
    return Axis(
        title=f"{title}{', lower is better' if is_loss else ''}",
        show=(lambda value: f"{value:g}") if is_loss else (lambda value: f"{100 * value:g}%"),
        lower_is_better=is_loss,
    )
