"""Figures of the results pages, as pictures of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pictures import COLORS, WIDTH, group, picture, sized, text
from result_data import IMAGES, Output, labeled, measure_of, select, show
from unspool.core.charts import HEIGHT, Frame, Point, Series, line_chart, marker
from unspool.core.html import element, svg_line
from unspool.core.sizes import parse_size
from unspool.studies.two_level import arm_interval


def figure(settings: Mapping[str, Any]) -> Output:
    """Values by length or position, by arm. Settings: data, file, title, measure, lengths, rows (label: arm), where.

    `*` in the measure stands for the length: niah/* with lengths [8K, 16K], perplexity/* with [4K-8K, 8K-16K].
    """
    data, where, lengths = settings["data"], settings.get("where"), [str(one) for one in settings["lengths"]]
    arms = {label: select(data, names, where) for label, names in labeled(settings, "rows").items()}
    places = {length: parse_size(length.rpartition("-")[2]) for length in lengths}  # a range ends at its place
    measures = {one: measure_of(settings["measure"].replace("*", one), list(arms.values())) for one in lengths}
    series = []
    for style, (label, by_seed) in enumerate(arms.items()):
        points = []
        for length, measure in measures.items():
            found = arm_interval(by_seed, measure)
            if found is not None:
                tooltip = f"{label}: {show(found, measure)}"
                points.append(Point(x=places[length], y=found.value, low=found.low, high=found.high, tooltip=tooltip))
        series.append(Series(label=label, style=style, points=points))
    bounded = all(measure.is_bounded for measure in measures.values())
    frame = Frame(
        label=settings["title"],
        x_title="position" if "-" in lengths[0] else "context length",
        x_ticks=[(place, length) for length, place in places.items()],
        show_y=lambda value: f"{value:.0%}" if bounded else f"{value:g}",
        log_x=True,
        y_range=(0.0, 1.0) if bounded else None,
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
