"""Figures of the results pages, as pictures of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pictures import COLORS, WIDTH, group, picture, sized, text
from result_data import IMAGES, Output, labeled, measure_of, select
from unspool.core.charts import HEIGHT, Frame, Point, Series, line_chart, marker
from unspool.core.html import element, svg_line
from unspool.core.sizes import format_size, parse_size
from unspool.studies.two_level import arm_interval


def figure(settings: Mapping[str, Any]) -> Output:
    """Score by length, by arm. Settings: data, file, title, measure (`niah/*`), lengths, rows (label: arm), where."""
    data, where = settings["data"], settings.get("where")
    rows = labeled(settings, "rows")
    lengths = [parse_size(length) for length in settings["lengths"]]
    series = []
    for style, (label, names) in enumerate(rows.items()):
        by_seed = select(data, names, where)
        points = []
        for length in lengths:
            measure = measure_of(settings["measure"].replace("*", format_size(length)), [by_seed])
            found = arm_interval(by_seed, measure)
            points.append(
                Point(x=length, y=None)
                if found is None
                else Point(
                    x=length, y=found.value, low=found.low, high=found.high, tooltip=f"{label}: {found.value:.0%}"
                )
            )
        series.append(Series(label=label, style=style, points=points))
    frame = Frame(
        label=settings["title"],
        x_title="context length",
        x_ticks=[(length, format_size(length)) for length in lengths],
        show_y=lambda value: f"{value:.0%}",
        log_x=True,
        y_range=(0.0, 1.0),
    )
    path = IMAGES / settings["file"]
    return Output(
        text=f"![{settings['title']}](../images/{settings['file']})",
        figures={path: line_picture(settings["title"], series, frame) + "\n"},
    )


MARKS = ".hit { fill: none; } .dot { stroke: #fff; stroke-width: 1; } .whisker { stroke-width: 1.6; } " + " ".join(
    f".m{at} .dot {{ fill: {color}; }} .m{at} .whisker {{ stroke: {color}; }}" for at, color in enumerate(COLORS)
)


def line_picture(title: str, series: Sequence[Series], frame: Frame) -> str:
    """Draw a line chart with a legend as a picture of its own, readable on light and dark pages."""
    columns = 2
    parts = [element("style", Markup(MARKS)), text(14, 24, title, "title")]
    for at, one in enumerate(series):
        x, y = 14 + at % columns * 200.0, 48 + at // columns * 20.0
        key = svg_line(x, y - 4, x + 24, y - 4, "line") + marker(one.style, x + 12, y - 4)
        parts += [element("g", key, class_=f"m{one.style % len(COLORS)}"), text(x + 31, y, one.label)]
    top = 48 + -(-len(series) // columns) * 20.0 - 8
    parts.append(group(top, sized(line_chart(series, frame), WIDTH, HEIGHT)))
    parts.append(text(14, top + HEIGHT + 18, "Vertical bars: 95% intervals."))
    return picture(top + HEIGHT + 32, title, *parts)
