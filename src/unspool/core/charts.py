"""Charts as inline SVG for self-contained pages: lines with intervals, bars in pairs, scatter plots, heatmaps.

Every text is escaped. Colors are CSS classes (`m0`, `m1`, …), so that a model has one color everywhere and the page's
dark mode applies. Charts scale with the page and carry tooltips.
"""

# No matplotlib or plotly: their pictures ignore the page's colors, font and dark mode. A self-contained plotly page
# takes megabytes; these charts take a few kilobytes.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from unspool.core.formatting import clip
from unspool.core.html import element, svg, svg_line, svg_text

MODEL_STYLES = 8  # styles in the style sheets; further models reuse them
WIDTH, HEIGHT = 420.0, 250.0  # in viewBox units: about a phone's width, so that text stays readable there
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 22.0, 40.0
FLOOR = HEIGHT - BOTTOM
MIDDLE = (LEFT + WIDTH - RIGHT) / 2
DODGE, MAX_DODGE = 5.0, 22.0  # sideways distance between models at one x, so that intervals do not overlap

Show = Callable[[float], str]
Place = Callable[[float], float]  # maps a value to a coordinate


@dataclass(frozen=True, kw_only=True)
class Figure:
    title: str
    note: str
    drawing: Markup


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

    label: str  # for screen readers
    x_title: str
    x_ticks: Sequence[tuple[float, str]]
    show_y: Show
    log_x: bool = False
    log_y: bool = False  # points must then be above 0
    y_range: tuple[float, float] | None = None  # None: fits the data
    mark: tuple[float, str] | None = None  # a vertical line and its meaning
    dots: bool = True  # off for curves of many points
    dodge: bool = True  # shift models sideways, so that their intervals do not overlap


def line_chart(series: Sequence[Series], frame: Frame) -> Markup:
    """Lines with a marker, a tooltip and an interval at each point."""
    low, high = frame.y_range or _data_range(series)
    y_ticks = decades(low, high) if frame.log_y else nice_ticks(low, high)
    place_x = _scale_x(series, frame)
    place_y = _scale(y_ticks[0], y_ticks[-1], FLOOR, TOP, math.log10 if frame.log_y else float)
    dodge = min(DODGE, MAX_DODGE / max(1, len(series))) if frame.dots and frame.dodge else 0.0
    lines = []
    for order, one in enumerate(series):
        shift = dodge * (order - (len(series) - 1) / 2)
        lines.append(_draw_series(one, lambda x, shift=shift: place_x(x) + shift, place_y, dots=frame.dots))  # type: ignore[misc]
    return svg(WIDTH, HEIGHT, frame.label, _y_axis(y_ticks, place_y, frame.show_y), _x_axis(frame, place_x), *lines)


def _scale(low: float, high: float, start: float, stop: float, turn: Callable[[float], float] = float) -> Place:
    """Map values in [low, high] to coordinates in [start, stop]; `turn` is the axis scale, such as a logarithm."""
    first, last = turn(low), turn(high)
    if last == first:
        return lambda value: (start + stop) / 2
    return lambda value: start + (stop - start) * (turn(value) - first) / (last - first)


def _data_range(series: Sequence[Series]) -> tuple[float, float]:
    points = [point for one in series for point in one.points if point.y is not None]
    values = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _scale_x(series: Sequence[Series], frame: Frame) -> Place:
    values = [point.x for one in series for point in one.points] + [x for x, _ in frame.x_ticks]
    values += [frame.mark[0]] if frame.mark else []
    # Dots at the edge need space for their dodge and their marker.
    margin = 18.0 if frame.dots else 2.0
    turn = math.log2 if frame.log_x else float
    return _scale(min(values), max(values), LEFT + margin, WIDTH - RIGHT - margin, turn)


def _y_axis(ticks: Sequence[float], place_y: Place, show: Show, *, right: float = WIDTH - RIGHT) -> Markup:
    drawn = [
        svg_line(LEFT, y, right, y) + svg_text(LEFT - 7, y + 4, show(tick), "end")
        for tick, y in ((tick, place_y(tick)) for tick in ticks)
    ]
    return element("g", *drawn)


def _x_axis(frame: Frame, place_x: Place) -> Markup:
    parts = [
        svg_line(LEFT, FLOOR, WIDTH - RIGHT, FLOOR, "axis"),
        svg_text(MIDDLE, HEIGHT - 5, frame.x_title, class_="title"),
    ]
    for value, label in frame.x_ticks:
        x = place_x(value)
        parts += [svg_line(x, FLOOR, x, FLOOR + 4, "axis"), svg_text(x, FLOOR + 17, label)]
    if frame.mark:
        x = place_x(frame.mark[0])
        anchor = "start" if x < WIDTH / 2 else "end"
        parts += [svg_line(x, TOP - 4, x, FLOOR, "mark"), svg_text(x, TOP - 9, frame.mark[1], anchor, "mark-text")]
    return element("g", *parts)


def _draw_series(one: Series, place_x: Place, place_y: Place, *, dots: bool) -> Markup:
    parts = []
    for run in _unbroken(one.points):
        path = " ".join(f"{place_x(p.x):.1f},{place_y(p.y):.1f}" for p in run if p.y is not None)
        parts.append(element("polyline", class_="line", points=path))
    for point in one.points if dots else ():
        if point.y is None:
            continue
        x, y = place_x(point.x), place_y(point.y)
        details = [element("title", point.tooltip or f"{one.label}: {point.y:g}")]
        if point.low is not None and point.high is not None:
            details.append(svg_line(x, place_y(point.low), x, place_y(point.high), "whisker"))
        parts.append(element("g", *details, *_dot(one.style, x, y)))
    if not dots:
        parts.append(element("title", one.label))
    return element("g", *parts, class_=f"m{one.style % MODEL_STYLES}")


def _dot(style: int, x: float, y: float, size: float = 4.0) -> list[Markup]:
    # An invisible disc makes the tooltip easy to hit with a finger.
    return [element("circle", class_="hit", cx=x, cy=y, r=12), marker(style, x, y, size)]


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """Split points at missing values: a line across a gap would invent a number."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.y is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if len(run) > 1]


_SHAPES: tuple[tuple[tuple[float, float], ...], ...] = (
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ((0, -1.35), (1.3, 1), (-1.3, 1)),
    ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
    ((0, 1.35), (1.3, -1), (-1.3, -1)),
)


def marker(style: int, x: float, y: float, size: float = 4.0) -> Markup:
    """Draw a different shape per model, for readers who cannot rely on color."""
    number = style % (len(_SHAPES) + 1)
    if number == 0:
        return element("circle", class_="dot", cx=x, cy=y, r=size)
    corners = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in _SHAPES[number - 1])
    return element("polygon", class_="dot", points=corners)


def swatch(style: int) -> Markup:
    """Draw a legend key: a short line with its marker."""
    drawn = element("g", svg_line(1, 7, 25, 7, "line"), marker(style, 13.0, 7.0), class_=f"m{style % MODEL_STYLES}")
    return element("svg", drawn, class_="swatch", viewBox="0 0 26 14", width=26, height=14, aria_hidden="true")


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that cover [low, high]."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / (count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around the values, at most eight or nine of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = -(-(last - first) // 7)
    return [10.0**power for power in range(first, last + every, every)]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two adjacent bars."""

    label: str
    first: float  # shares, 0 to 1
    second: float
    tooltip: str


BARS_LEFT, BARS_TOP, BARS_BOTTOM = 44.0, 10.0, 42.0
LABEL_WIDTH, MAX_BAR, LETTER = 50.0, 26.0, 6.6


def pair_bars(pairs: Sequence[Pair], *, label: str, x_title: str, size: tuple[float, float] = (320.0, 168.0)) -> Markup:
    """Draw pairs of shares as bars that differ in shade and outline as well as hue. By default as wide as a heatmap."""
    width, height = size
    ticks = nice_ticks(0.0, max((max(pair.first, pair.second) for pair in pairs), default=0.0) or 1.0, 4)
    floor = height - BARS_BOTTOM
    place_y = _scale(0.0, ticks[-1], floor, BARS_TOP)
    step = (width - BARS_LEFT - 6) / max(1, len(pairs))
    bar = min(step * 0.4, MAX_BAR)
    parts = []
    for tick in ticks:
        y = place_y(tick)
        parts += [svg_line(BARS_LEFT, y, width, y), svg_text(BARS_LEFT - 6, y + 4, f"{100 * tick:g}%", "end")]
    stride = -(-len(pairs) // int(width // LABEL_WIDTH))
    for at, pair in enumerate(pairs):
        left = BARS_LEFT + step * at
        middle = left + step / 2
        parts.append(
            element(
                "g",
                element("title", pair.tooltip),
                element("rect", class_="hit", x=left, y=BARS_TOP, width=step, height=floor - BARS_TOP),
                _bar("first", middle - bar, place_y(pair.first), bar, floor),
                _bar("second", middle, place_y(pair.second), bar, floor),
            )
        )
        # Counted from the last one, which matters most.
        if (len(pairs) - 1 - at) % stride == 0:
            parts.append(svg_text(middle, floor + 15, clip(pair.label, max(4, int(step * stride / LETTER)))))
    parts.append(svg_text((BARS_LEFT + width) / 2, height - 6, x_title, class_="title"))
    return svg(width, height, label, *parts)


def _bar(style: str, x: float, y: float, width: float, floor: float) -> Markup:
    return element("rect", class_=f"bar-{style}", x=x, y=y, width=width, height=floor - y)


def bar_key(style: str) -> Markup:
    """Draw a legend key: `first` or `second`."""
    box = _bar(style, 1, 1, 12, 13)
    return element("svg", box, class_="key", viewBox="0 0 14 14", width=14, height=14, aria_hidden="true")


@dataclass(frozen=True, kw_only=True)
class Span:
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Dot:
    label: str
    style: int
    x: Span
    y: Span
    tooltip: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    title: str
    show: Show
    lower_is_better: bool = False

    def ticks(self, spans: Sequence[Span]) -> list[float]:
        values = [value for span in spans for value in (span.value, span.low, span.high) if value is not None]
        return nice_ticks(min(values), max(values))

    def place(self, ticks: Sequence[float], start: float, stop: float) -> Place:
        """Map values to coordinates; `start` is the worse end."""
        low, high = (ticks[-1], ticks[0]) if self.lower_is_better else (ticks[0], ticks[-1])
        return _scale(low, high, start, stop)


def scatter(dots: Sequence[Dot], axes: tuple[Axis, Axis], label: str) -> Markup:
    """Draw one marker per model with intervals on both axes; axes point to the better side."""
    x_axis, y_axis = axes
    x_ticks, y_ticks = x_axis.ticks([dot.x for dot in dots]), y_axis.ticks([dot.y for dot in dots])
    place_x = x_axis.place(x_ticks, LEFT + 6, WIDTH - RIGHT - 12)
    place_y = y_axis.place(y_ticks, FLOOR - 6, TOP + 6)
    parts = [svg_line(LEFT, FLOOR, WIDTH - RIGHT, FLOOR, "axis"), _y_axis(y_ticks, place_y, y_axis.show)]
    for tick in x_ticks:
        x = place_x(tick)
        parts += [svg_line(x, TOP, x, FLOOR), svg_text(x, FLOOR + 17, x_axis.show(tick))]
    parts.append(svg_text(MIDDLE, HEIGHT - 5, f"{x_axis.title} →", class_="title"))
    parts.append(svg_text(4.0, TOP - 9, f"↑ {y_axis.title}", "start", "title"))
    return svg(WIDTH, HEIGHT, label, *parts, *(_scatter_dot(dot, place_x, place_y) for dot in dots))


def _scatter_dot(dot: Dot, place_x: Place, place_y: Place) -> Markup:
    x, y = place_x(dot.x.value), place_y(dot.y.value)
    parts = [element("title", dot.tooltip)]
    if dot.x.low is not None and dot.x.high is not None:
        parts.append(svg_line(place_x(dot.x.low), y, place_x(dot.x.high), y, "whisker"))
    if dot.y.low is not None and dot.y.high is not None:
        parts.append(svg_line(x, place_y(dot.y.low), x, place_y(dot.y.high), "whisker"))
    return element("g", *parts, *_dot(dot.style, x, y, 5.0), class_=f"m{dot.style % MODEL_STYLES}")


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
    mark_after: int | None = None  # draw a line after this many columns
    total_row: bool = False  # the last row is a total, set apart


HEAT_WIDTH, HEAT_LEFT, HEAT_ROW, HEAT_TOP = 320.0, 46.0, 30.0, 18.0
TOTAL_GAP, NARROW_COLUMN = 8.0, 34.0


def heatmap(panel: Heatmap) -> Markup:
    column = (HEAT_WIDTH - HEAT_LEFT - 2) / max(1, len(panel.columns))
    tops = [HEAT_TOP + HEAT_ROW * row for row in range(len(panel.rows))]
    if panel.total_row:
        tops[-1] += TOTAL_GAP
    floor = tops[-1] + HEAT_ROW
    parts = [svg_text(HEAT_LEFT - 8, HEAT_TOP - 6, panel.y_title, "end", "title")]
    for top, name, cells in zip(tops, panel.rows, panel.cells, strict=True):
        parts.append(svg_text(HEAT_LEFT - 8, top + HEAT_ROW / 2 + 4, name, "end"))
        parts += [_heat_cell(cell, HEAT_LEFT + column * at, top, column) for at, cell in enumerate(cells)]
    # Labels such as 128K do not fit a narrow column, so every second one is drawn, counted from the last.
    stride = 1 if column >= NARROW_COLUMN else 2
    for at in range(len(panel.columns) - 1, -1, -stride):
        parts.append(svg_text(HEAT_LEFT + column * (at + 0.5), floor + 16, panel.columns[at]))
    parts.append(svg_text((HEAT_LEFT + HEAT_WIDTH) / 2, floor + 34, panel.x_title, class_="title"))
    if panel.mark_after is not None:
        x = HEAT_LEFT + column * panel.mark_after
        parts.append(svg_line(x, HEAT_TOP - 6, x, floor + 4, "mark"))
    return svg(HEAT_WIDTH, floor + 42, panel.label, *parts)


def _heat_cell(cell: HeatCell, left: float, top: float, width: float) -> Markup:
    box = {"x": left + 1, "y": top + 1, "width": width - 2, "height": HEAT_ROW - 2, "rx": 3}
    parts = [element("title", cell.tooltip), element("rect", class_="heat-back", **box)]
    if cell.value is not None:
        parts.append(element("rect", class_="heat", fill_opacity=f"{heat_strength(cell.value):.3f}", **box))
    turned = [name for name, value in INK_TURNS.items() if cell.value is not None and cell.value >= value]
    ink = " ".join(["heat-text", *turned])
    return element("g", *parts, svg_text(left + width / 2, top + HEAT_ROW / 2 + 4, cell.text, class_=ink))


# From these values on, white text reads better on the light page and black text on the dark one. The contrast is then
# at least 4.5 everywhere.
INK_TURNS = {"on-light": 0.65, "on-dark": 0.52}


def heat_strength(value: float) -> float:
    """Return the opacity over the panel's background, the same in light and dark mode."""
    return 0.05 + 0.95 * min(1.0, max(0.0, value))


def heat_scale() -> Markup:
    """The color legend, 0% to 100%."""
    boxes = [
        element("rect", class_="heat", x=30 + 8 * at, y=2, width=8, height=12, fill_opacity=f"{strength:.3f}")
        for at, strength in enumerate(heat_strength(step / 20) for step in range(21))
    ]
    ends = [svg_text(24, 13, "0%", "end"), svg_text(204, 13, "100%", "start")]
    return svg(242, 16, "Color scale: paler is 0%, stronger is 100%", *boxes, *ends, class_="scale")
