"""The HTML page of an effective-length measurement: score by length and depth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unspool import __version__
from unspool.core.charts import (
    MODEL_STYLES,
    Figure,
    Frame,
    HeatCell,
    Heatmap,
    Point,
    Series,
    heat_scale,
    heatmap,
    line_chart,
    swatch,
)
from unspool.core.formatting import MISSING, format_duration, format_percent, printable
from unspool.core.html import load_templates, write_text
from unspool.core.sizes import format_size
from unspool.core.table import Entry, Table
from unspool.evals.look_facts import TASK_TITLES
from unspool.reporting.figures import thin_ticks

ALL = "mean of tasks"


def write_look(summary: Mapping[str, Any], out_file: Path) -> None:
    """Write the page of a summary with the key `look`."""
    facts = summary["look"]
    environment = load_templates(Path(__file__).parent)
    environment.globals.update(swatch=swatch, heat_scale=heat_scale, styles=MODEL_STYLES)
    rows = facts["lengths"]
    page = {
        "model": printable(summary["model"]),
        "sentence": printable(facts["sentence"]),
        "notes": [printable(note) for note in facts["notes"]],
        "about": _about(facts),
        "curve": _curve(facts) if rows else None,
        "legend": _legend(facts),
        "depths": _depths(summary) if rows else None,
        "table": _table(facts),
        "version": __version__,
    }
    write_text(out_file, environment.get_template("look_page.html.j2").render(**page))


def _about(facts: Mapping[str, Any]) -> list[str]:
    context = facts["context"]
    claimed = [f"claimed context {format_size(context['tokens'])} ({context['source']})"] if context else []
    return [*claimed, f"{facts['questions']} questions", format_duration(facts["seconds"])]


def _legend(facts: Mapping[str, Any]) -> list[tuple[str, int]]:
    tasks = list(facts["lengths"][0]["tasks"]) if facts["lengths"] else []
    return [(ALL, 1), *((TASK_TITLES.get(task, task), at) for at, task in enumerate(tasks, start=2))]


def _curve(facts: Mapping[str, Any]) -> Figure:
    rows, found = facts["lengths"], facts["effective_length"]
    whole = Series(label=ALL, style=1, points=[_point(ALL, row["length"], row, bounds=True) for row in rows])
    tasks = [
        Series(
            label=TASK_TITLES.get(task, task),
            style=at,
            points=[_point(TASK_TITLES.get(task, task), row["length"], row["tasks"][task]) for row in rows],
        )
        for at, task in enumerate(rows[0]["tasks"], start=2)
    ]
    ticks = [(float(length), format_size(length)) for length in [row["length"] for row in rows] + facts["not_asked"]]
    frame = Frame(
        label="Score by prompt length; the table has the same numbers.",
        x_title="prompt length (tokens)",
        x_ticks=thin_ticks(ticks),
        show_y=lambda value: f"{100 * value:.0f}%",
        log_x=True,
        y_range=(0.0, 1.0),
        mark=(float(found["value"]), f"effective length {format_size(found['value'])}") if found else None,
        dodge=False,
    )
    note = "share of correct answers; all tasks have equal weight; bars are 95% intervals of the mean"
    return Figure(title="Score by length", note=note, drawing=line_chart([*tasks, whole], frame))


def _point(label: str, length: int, cell: Mapping[str, Any], *, bounds: bool = False) -> Point:
    shown = f"{label}, {format_size(length)}: {_with_interval(cell)}, n = {cell['n']}"
    low, high = (cell["low"], cell["high"]) if bounds else (None, None)
    return Point(x=float(length), y=cell["value"], low=low, high=high, tooltip=shown)


def _with_interval(cell: Mapping[str, Any]) -> str:
    return f"{format_percent(cell['value'])} ({100 * cell['low']:.0f}–{100 * cell['high']:.0f})"


def _depths(summary: Mapping[str, Any]) -> Figure | None:
    """Needle recall by length and depth."""
    cells = [cell for cell in summary["cells"] if cell["suite"] == "niah" and cell["n"]]
    depths = sorted({cell["depth"] for cell in cells if cell["depth"] is not None})
    lengths = sorted({cell["length"] for cell in cells})
    if not depths:
        return None
    by_place = {(cell["length"], cell["depth"]): cell for cell in cells}
    rows = [[_heat_cell(by_place.get((length, depth))) for length in lengths] for depth in [*depths, None]]
    panel = Heatmap(
        label="Needle recall by length and depth; summary.json has the same numbers.",
        columns=[format_size(length) for length in lengths],
        rows=[*(format_percent(depth) for depth in depths), "all"],
        cells=rows,
        x_title="prompt length (tokens)",
        y_title="depth",
        total_row=True,
    )
    note = "percent of needles found, by depth in the text (0% is the start)"
    return Figure(title="Needle by depth", note=note, drawing=heatmap(panel))


def _heat_cell(cell: Mapping[str, Any] | None) -> HeatCell:
    if cell is None:
        return HeatCell(value=None, text=MISSING, tooltip="not tested")
    shown = f"{format_size(cell['length'])}: {_with_interval(cell)}, n = {cell['n']}"
    return HeatCell(value=cell["value"], text=format_percent(cell["value"])[:-1], tooltip=shown)


def _table(facts: Mapping[str, Any]) -> Table:
    rows = facts["lengths"]
    tasks = list(rows[0]["tasks"]) if rows else []
    body = [
        [
            Entry(text=format_size(row["length"])),
            *(_entry(cell) for cell in (row, *(row["tasks"][task] for task in tasks))),
            Entry(text=f"{row['n']:,}"),
        ]
        for row in rows
    ]
    empty = [Entry(text=MISSING, note="not tested"), *[Entry(text=MISSING)] * (len(tasks) + 1)]
    body += [[Entry(text=format_size(length)), *empty] for length in facts["not_asked"]]
    titles = [TASK_TITLES.get(task, task) for task in tasks]
    note = "Percent of correct answers with 95% intervals."
    return Table(caption="Score by length", columns=["length", ALL, *titles, "n"], rows=body, note=note)


def _entry(cell: Mapping[str, Any]) -> Entry:
    interval = f"{100 * cell['low']:.0f}–{100 * cell['high']:.0f}"
    return Entry(text=format_percent(cell["value"]), note=interval, tooltip=f"n = {cell['n']}")
