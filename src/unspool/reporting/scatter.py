"""A scatter of models as inline SVG: one marker each, with intervals both ways.

In: numbers and labels. Out: markup that is safe to put into the page.
Promise: axes point to the better side; each dot carries its name, a tooltip and the colour of its model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from unspool.reporting.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MODEL_STYLES,
    RIGHT,
    TOP,
    WIDTH,
    element,
    marker,
    nice_ticks,
    svg,
)


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
    show: Callable[[float], str]
    lower_is_better: bool = False

    def ticks(self, spans: Sequence[Span]) -> list[float]:
        values = [value for span in spans for value in (span.value, span.low, span.high) if value is not None]
        return nice_ticks(min(values), max(values))

    def place(self, ticks: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
        """From values to the drawing, `start` being the worse end."""
        low, high = (ticks[-1], ticks[0]) if self.lower_is_better else (ticks[0], ticks[-1])
        return lambda value: start + (stop - start) * (value - low) / (high - low)


def scatter(dots: Sequence[Dot], axes: tuple[Axis, Axis], label: str) -> Markup:
    x_axis, y_axis = axes
    x_ticks, y_ticks = x_axis.ticks([dot.x for dot in dots]), y_axis.ticks([dot.y for dot in dots])
    floor = HEIGHT - BOTTOM
    place_x = x_axis.place(x_ticks, LEFT + 6, WIDTH - RIGHT - 12)
    place_y = y_axis.place(y_ticks, floor - 6, TOP + 6)
    parts = [element("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor)]
    for tick in y_ticks:
        y = place_y(tick)
        parts.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(element("text", y_axis.show(tick), class_="tick", x=LEFT - 7, y=y + 4, text_anchor="end"))
    for tick in x_ticks:
        x = place_x(tick)
        parts.append(element("line", class_="grid", x1=x, x2=x, y1=TOP, y2=floor))
        parts.append(element("text", x_axis.show(tick), class_="tick", x=x, y=floor + 17, text_anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(element("text", f"{x_axis.title} →", class_="title", x=middle, y=HEIGHT - 5, text_anchor="middle"))
    parts.append(element("text", f"↑ {y_axis.title}", class_="title", x=4.0, y=TOP - 9))
    parts += [_dot(dot, place_x, place_y) for dot in dots]
    return svg(WIDTH, HEIGHT, label, *parts)


def _dot(dot: Dot, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> Markup:
    x, y = place_x(dot.x.value), place_y(dot.y.value)
    parts = [element("title", dot.tooltip)]
    if dot.x.low is not None and dot.x.high is not None:
        parts.append(element("line", class_="whisker", x1=place_x(dot.x.low), x2=place_x(dot.x.high), y1=y, y2=y))
    if dot.y.low is not None and dot.y.high is not None:
        parts.append(element("line", class_="whisker", x1=x, x2=x, y1=place_y(dot.y.low), y2=place_y(dot.y.high)))
    parts.append(element("circle", class_="hit", cx=x, cy=y, r=12))
    parts.append(marker(dot.style, x, y, 5.0))
    return element("g", *parts, class_=f"m{dot.style % MODEL_STYLES}")
