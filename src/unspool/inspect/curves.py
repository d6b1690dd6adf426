"""Curves over distances as inline SVG: several rows sets on one chart.

Promise: colours are classes of the page's style sheet; each curve also has a marker of its own shape, so that
colour is not all that tells them apart. Every text is escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

# In viewBox units: about a phone's width, so that text stays readable there.
WIDTH, HEIGHT = 420.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 14.0, 44.0
_MOST_LABELS = 9
# Drawn around (0, 0).
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.6 -3.6h7.2v7.2h-7.2Z",
    "M0 -4.6L4.4 3.4H-4.4Z",
    "M0 -5L4.4 0L0 5L-4.4 0Z",
    "M0 4.6L4.4 -3.4H-4.4Z",
    "M-1.4 -4.4h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3Z",
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    style: str  # class that gives the colour
    marker: int
    values: Sequence[float | None]  # one for each name on the x axis; None leaves a gap
    tips: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Axes:
    about: str  # what a screen reader says
    x_title: str
    x_names: Sequence[str]
    show_y: Callable[[float], str]
    log_y: bool = False  # values of 0 then leave a gap


def marker(number: int, style: str, x: float = 0, y: float = 0) -> Markup:
    return Markup('<path class="{}" transform="translate({:.1f} {:.1f})" d="{}"></path>').format(
        style, x, y, MARKERS[number % len(MARKERS)]
    )


def curve_chart(curves: Sequence[Curve], axes: Axes) -> Markup:
    known = [value for curve in curves for value in curve.values if value is not None and (value > 0 or not axes.log_y)]
    if not known:
        return Markup("")
    ticks = decades(min(known), max(known)) if axes.log_y else even_ticks(max(known))
    turn: Callable[[float], float] = math.log10 if axes.log_y else float
    low, high = turn(ticks[0]), turn(ticks[-1])
    floor = HEIGHT - BOTTOM
    wide = (WIDTH - LEFT - RIGHT) / max(1, len(axes.x_names))

    def place_x(number: int) -> float:
        return LEFT + wide * (number + 0.5)

    def place_y(value: float) -> float:
        return floor - (floor - TOP) * (turn(value) - low) / (high - low)

    drawn = [_grid(place_y(tick), axes.show_y(tick)) for tick in ticks]
    every = -(-len(axes.x_names) // _MOST_LABELS)
    for number, name in enumerate(axes.x_names):
        if number % every == 0:
            drawn.append(_text(place_x(number), floor + 17, name, "middle"))
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axes.x_title, "middle"))
    for curve in curves:
        places = [
            None if value is None or (axes.log_y and value <= 0) else (place_x(number), place_y(value))
            for number, value in enumerate(curve.values)
        ]
        drawn += _curve(curve, places)
    return Markup('<svg class="chart curves" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        f"{WIDTH:g}", f"{HEIGHT:g}", axes.about, Markup("").join(drawn)
    )


def even_ticks(top: float) -> list[float]:
    """From 0 to at least `top`, in at most six steps of 1, 2 or 5."""
    unit = 10.0 ** math.floor(math.log10(top)) if top > 0 else 1.0
    step = next(unit * factor for factor in (0.1, 0.2, 0.5, 1, 2, 5) if top / (unit * factor) <= 6)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)] if top > 0 else [0.0, 1.0]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten around the values, not more than eight of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    every = -(-(last - first) // 7)
    return [10.0**power for power in range(first, last + every, every)]


def _curve(curve: Curve, places: Sequence[tuple[float, float] | None]) -> list[Markup]:
    runs: list[list[str]] = [[]]
    for place in places:
        if place is None:
            runs.append([])
        else:
            runs[-1].append(f"{place[0]:.1f} {place[1]:.1f}")
    path = "".join("M" + "L".join(run) for run in runs if run)
    drawn = [Markup('<path class="curve {}" d="{}"></path>').format(curve.style, path)]
    for place, tip in zip(places, curve.tips, strict=True):
        if place is not None:
            shape = marker(curve.marker, curve.style, *place)
            drawn.append(Markup("<g>{}<title>{}</title></g>").format(shape, tip))
    return drawn


def _grid(y: float, name: str) -> Markup:
    line = Markup('<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"></line>')
    return line.format(LEFT, WIDTH - RIGHT, y, y) + _text(LEFT - 6, y + 4, name, "end")


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, text)
