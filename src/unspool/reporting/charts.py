"""Charts as inline SVG: lines with intervals, and heatmaps.

In: plain numbers and labels. Out: markup that is safe to put into the page.
Promise: every text is escaped; colours are CSS classes (`m0`, `m1`, …), so that one model looks the
same everywhere and the page's dark mode applies. Charts scale with the page and carry tooltips.
"""

# No matplotlib or plotly: their pictures do not follow the page's colours, font and dark mode, and a
# self-contained plotly page weighs megabytes where these charts weigh a few kilobytes.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from unspool.reporting.number_format import plain_text

MODEL_STYLES = 8  # as many as page.css defines; further models start over
WIDTH = 420.0  # in viewBox units: about a phone's width, so that text stays readable there
HEIGHT = 250.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 22.0, 40.0
DODGE, MAX_DODGE = 5.0, 22.0  # sideways distance between models at one x, so that intervals do not cover each other


def element(name: str, *children: object, **attributes: object) -> Markup:
    """One SVG element; children and attribute values are escaped unless they are markup already."""
    shown = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    text = "".join(f' {key}="{escape(_plain(value))}"' for key, value in shown.items())
    return Markup(f"<{name}{text}>{''.join(escape(_plain(child)) for child in children)}</{name}>")


def _plain(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return plain_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float | None  # None leaves a gap
    low: float | None = None
    high: float | None = None
    tooltip: str = ""


@dataclass(frozen=True, kw_only=True)
class Series:
    label: str
    style: int
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Axes of a line chart."""

    label: str  # what a screen reader says
    x_title: str
    x_ticks: Sequence[tuple[float, str]]
    show_y: Callable[[float], str]
    log_x: bool = False
    y_range: tuple[float, float] | None = None  # None: fits the data
    mark: tuple[float, str] | None = None  # a vertical line and what it means
    dots: bool = True  # off for curves of many points


def line_chart(series: Sequence[Series], frame: Frame) -> Markup:
    """Lines with a marker, a tooltip and an interval at each point."""
    y_ticks = nice_ticks(*(frame.y_range or _data_range(series)))
    place_x = _scale_x(series, frame)
    low, high = (y_ticks[0], y_ticks[-1])

    def place_y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - low) / (high - low)

    axes = [_y_axis(y_ticks, place_y, frame.show_y), _x_axis(frame, place_x)]
    lines = []
    dodge = min(DODGE, MAX_DODGE / max(1, len(series))) if frame.dots else 0.0
    for order, one in enumerate(series):
        shift = dodge * (order - (len(series) - 1) / 2)
        lines.append(_line(one, lambda x, shift=shift: place_x(x) + shift, place_y, dots=frame.dots))  # type: ignore[misc]
    return svg(WIDTH, HEIGHT, frame.label, *axes, *lines)


def svg(width: float, height: float, label: str, *children: Markup) -> Markup:
    return element("svg", *children, class_="chart", viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def _data_range(series: Sequence[Series]) -> tuple[float, float]:
    points = [point for one in series for point in one.points if point.y is not None]
    values = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _scale_x(series: Sequence[Series], frame: Frame) -> Callable[[float], float]:
    values = [point.x for one in series for point in one.points] + [x for x, _ in frame.x_ticks]
    values += [frame.mark[0]] if frame.mark else []
    turn: Callable[[float], float] = math.log2 if frame.log_x else float
    low, high = turn(min(values)), turn(max(values))
    # Dots at the edge need room for their dodge and their marker.
    room = 18.0 if frame.dots else 2.0
    span = WIDTH - LEFT - RIGHT - 2 * room
    if high == low:
        return lambda x: LEFT + room + span / 2
    return lambda x: LEFT + room + span * (turn(x) - low) / (high - low)


def _y_axis(ticks: Sequence[float], place_y: Callable[[float], float], show: Callable[[float], str]) -> Markup:
    parts = []
    for tick in ticks:
        y = place_y(tick)
        parts.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(element("text", show(tick), class_="tick", x=LEFT - 7, y=y + 4, text_anchor="end"))
    return element("g", *parts)


def _x_axis(frame: Frame, place_x: Callable[[float], float]) -> Markup:
    floor = HEIGHT - BOTTOM
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [
        element("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor),
        element("text", frame.x_title, class_="title", x=middle, y=HEIGHT - 5, text_anchor="middle"),
    ]
    for value, label in frame.x_ticks:
        x = place_x(value)
        parts.append(element("line", class_="axis", x1=x, x2=x, y1=floor, y2=floor + 4))
        parts.append(element("text", label, class_="tick", x=x, y=floor + 17, text_anchor="middle"))
    if frame.mark:
        x = place_x(frame.mark[0])
        anchor = "start" if x < WIDTH / 2 else "end"
        parts.append(element("line", class_="mark", x1=x, x2=x, y1=TOP - 4, y2=floor))
        parts.append(element("text", frame.mark[1], class_="mark-text", x=x, y=TOP - 9, text_anchor=anchor))
    return element("g", *parts)


def _line(one: Series, place_x: Callable[[float], float], place_y: Callable[[float], float], *, dots: bool) -> Markup:
    parts = []
    for run in _unbroken(one.points):
        path = " ".join(f"{place_x(p.x):.1f},{place_y(p.y):.1f}" for p in run if p.y is not None)
        parts.append(element("polyline", class_="line", points=path))
    for point in one.points if dots else ():
        if point.y is None:
            continue
        x = place_x(point.x)
        details = [element("title", point.tooltip or f"{one.label}: {point.y:g}")]
        if point.low is not None and point.high is not None:
            details.append(element("line", class_="whisker", x1=x, x2=x, y1=place_y(point.low), y2=place_y(point.high)))
        # An invisible disc makes the tooltip easy to hit with a finger.
        details.append(element("circle", class_="hit", cx=x, cy=place_y(point.y), r=12))
        details.append(marker(one.style, x, place_y(point.y)))
        parts.append(element("g", *details))
    if not dots:
        parts.append(element("title", one.label))
    return element("g", *parts, class_=f"m{one.style % MODEL_STYLES}")


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """The stretches between missing values: a line drawn across a gap would invent a number."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.y is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if len(run) > 1]


def marker(style: int, x: float, y: float, size: float = 4.0) -> Markup:
    """A shape of its own per model, for readers who cannot rely on colour."""
    shapes: list[list[tuple[float, float]]] = [
        [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        [(0, -1.35), (1.3, 1), (-1.3, 1)],
        [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
        [(0, 1.35), (1.3, -1), (-1.3, -1)],
    ]
    if style % (len(shapes) + 1) == 0:
        return element("circle", class_="dot", cx=x, cy=y, r=size)
    corners = shapes[style % (len(shapes) + 1) - 1]
    return element(
        "polygon", class_="dot", points=" ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in corners)
    )


def swatch(style: int) -> Markup:
    """A legend's key: a piece of the line with its marker."""
    inside = [element("line", class_="line", x1=1, x2=25, y1=7, y2=7), marker(style, 13.0, 7.0)]
    drawing = element("g", *inside, class_=f"m{style % MODEL_STYLES}")
    return element("svg", drawing, class_="swatch", viewBox="0 0 26 14", width=26, height=14, aria_hidden="true")


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / (count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class HeatCell:
    value: float | None  # 0 to 1
    text: str
    tooltip: str


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """One panel: `cells[row][column]`."""

    label: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[HeatCell]]
    x_title: str
    y_title: str
    mark_after: int | None = None  # a line after so many columns
    total_row: bool = False  # the last row is a total, set apart


HEAT_WIDTH, HEAT_LEFT, HEAT_ROW, HEAT_TOP = 320.0, 46.0, 30.0, 18.0
TOTAL_GAP, NARROW_COLUMN = 8.0, 34.0


def heatmap(panel: Heatmap) -> Markup:
    column = (HEAT_WIDTH - HEAT_LEFT - 2) / max(1, len(panel.columns))
    tops = [HEAT_TOP + HEAT_ROW * row for row in range(len(panel.rows))]
    if panel.total_row:
        tops[-1] += TOTAL_GAP
    floor = tops[-1] + HEAT_ROW
    parts = [element("text", panel.y_title, class_="title", x=HEAT_LEFT - 8, y=HEAT_TOP - 6, text_anchor="end")]
    for top, name, cells in zip(tops, panel.rows, panel.cells, strict=True):
        parts.append(element("text", name, class_="tick", x=HEAT_LEFT - 8, y=top + HEAT_ROW / 2 + 4, text_anchor="end"))
        lefts = [HEAT_LEFT + column * index for index in range(len(cells))]
        parts += [_heat_cell(cell, left, top, column) for cell, left in zip(cells, lefts, strict=True)]
    # Labels such as 128K need more room than a narrow column has: then every second one, up to the last.
    stride = 1 if column >= NARROW_COLUMN else 2
    for index in range(len(panel.columns) - 1, -1, -stride):
        name = panel.columns[index]
        middle = HEAT_LEFT + column * (index + 0.5)
        parts.append(element("text", name, class_="tick", x=middle, y=floor + 16, text_anchor="middle"))
    middle = (HEAT_LEFT + HEAT_WIDTH) / 2
    parts.append(element("text", panel.x_title, class_="title", x=middle, y=floor + 34, text_anchor="middle"))
    if panel.mark_after is not None:
        x = HEAT_LEFT + column * panel.mark_after
        parts.append(element("line", class_="mark", x1=x, x2=x, y1=HEAT_TOP - 6, y2=floor + 4))
    return svg(HEAT_WIDTH, floor + 42, panel.label, *parts)


def _heat_cell(cell: HeatCell, left: float, top: float, width: float) -> Markup:
    box = {"x": left + 1, "y": top + 1, "width": width - 2, "height": HEAT_ROW - 2, "rx": 3}
    parts = [element("title", cell.tooltip), element("rect", class_="heat-back", **box)]
    if cell.value is not None:
        parts.append(element("rect", class_="heat", fill_opacity=f"{heat_strength(cell.value):.3f}", **box))
    turned = [name for name, value in INK_TURNS.items() if cell.value is not None and cell.value >= value]
    ink = " ".join(["heat-text", *turned])
    place = {"x": left + width / 2, "y": top + HEAT_ROW / 2 + 4}
    parts.append(element("text", cell.text, class_=ink, text_anchor="middle", **place))
    return element("g", *parts)


# From these values on, white on the light page and black on the dark one read better than the other way round; with
# both at their best the contrast is at least 4.5.
INK_TURNS = {"on-light": 0.65, "on-dark": 0.52}


def heat_strength(value: float) -> float:
    """Opacity over the panel's own background, so that one rule serves the light and the dark page."""
    return 0.05 + 0.95 * min(1.0, max(0.0, value))


def heat_scale() -> Markup:
    """The colour legend, 0% to 100%."""
    steps = [value / 20 for value in range(21)]
    boxes = [
        element("rect", class_="heat", x=30 + 8 * i, y=2, width=8, height=12, fill_opacity=f"{heat_strength(v):.3f}")
        for i, v in enumerate(steps)
    ]
    ends = [
        element("text", "0%", class_="tick", x=24, y=13, text_anchor="end"),
        element("text", "100%", class_="tick", x=204, y=13),
    ]
    label = "Colour scale: paler is 0%, stronger is 100%"
    return element("svg", *boxes, *ends, class_="scale", viewBox="0 0 242 16", role="img", aria_label=label)
