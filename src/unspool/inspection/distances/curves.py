"""Distances of several rows sets as one HTML file: curves, and the numbers they are drawn from.

Promise: as page.py: no network, no scripts, every text escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.core.html import load_templates, write_text
from unspool.core.sizes import format_count, format_size
from unspool.inspection.distances.count import Distances, bin_names, number_tables, rows_line, show_share
from unspool.inspection.items import one_line
from unspool.inspection.viewer_page import COLOURS

# Curves over distances as inline SVG: several rows sets on one chart.


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


# A bin with less of the pairs in every set is left to the table.
_SEEN = 0.005


@dataclass(frozen=True, kw_only=True)
class SetView:
    name: str
    path: str
    rows: str
    notes: list[str]
    key: Markup


def write_distances(sets: Sequence[Distances], beyond: Sequence[int], out_file: Path) -> None:
    write_text(out_file, render_distances(sets, beyond))


def render_distances(sets: Sequence[Distances], beyond: Sequence[int]) -> str:
    views = [_view(each, number) for number, each in enumerate(sets)]
    return (
        load_templates(Path(__file__).parent, Path(__file__).parents[1])
        .get_template("curves.html.j2")
        .render(
            sets=views,
            shares=_shares(sets),
            tails=_tails(sets),
            tables=number_tables(sets, beyond),
            version=__version__,
        )
    )


def _view(each: Distances, number: int) -> SetView:
    key = Markup('<svg class="key-line" viewBox="-14 -7 28 14" aria-hidden="true">{}{}</svg>').format(
        Markup('<path class="curve {}" d="M-14 0L14 0"></path>').format(_style(number)), marker(number, _style(number))
    )
    return SetView(
        name=one_line(each.text.name),
        path=one_line(str(each.text.path)),
        rows=rows_line(each),
        notes=[one_line(note) for note in each.text.notes],
        key=key,
    )


def _first_drawn(sets: Sequence[Distances]) -> int:
    """The first bin that can be seen in any set; half of a chart would be curves along its floor."""
    shares = zip(*([each.share(pairs) or 0 for pairs in each.pairs] for each in sets), strict=True)
    return next((place for place, values in enumerate(shares) if max(values) >= _SEEN), 0)


def _shares(sets: Sequence[Distances]) -> Markup:
    """What part of the pairs lies in each bin."""
    first = _first_drawn(sets)
    names = bin_names(sets[0].edges, max(each.text.reach for each in sets))
    curves = [
        Curve(
            style=_style(number),
            marker=number,
            # Where rows do not reach there is no share, rather than one of 0.
            values=[
                each.share(pairs) if edge < each.text.reach else None
                for edge, pairs in list(zip(each.edges, each.pairs, strict=True))[first:]
            ],
            tips=[
                f"{each.text.name}, {name}: {show_share(each.share(pairs))} of pairs"
                for name, pairs in list(zip(names, each.pairs, strict=True))[first:]
            ],
        )
        for number, each in enumerate(sets)
    ]
    axes = Axes(
        about="Share of pairs by distance, one curve for each rows set",
        x_title="distance in tokens, from here to the next mark",
        x_names=[format_size(edge) for edge in sets[0].edges[first:]],
        show_y=lambda share: f"{100 * share:.3g}%",
    )
    return curve_chart(curves, axes)


def _tails(sets: Sequence[Distances]) -> Markup:
    """How many pairs of a row are at least so far apart."""
    edges = sets[0].edges[_first_drawn(sets) :]
    curves = [
        Curve(
            style=_style(number),
            marker=number,
            values=[each.per_row(each.beyond[edge]) for edge in edges],
            tips=[
                f"{each.text.name}, {format_size(edge)} and more: {format_count(pairs)} per row"
                for edge, pairs in ((edge, each.per_row(each.beyond[edge])) for edge in edges)
            ],
        )
        for number, each in enumerate(sets)
    ]
    axes = Axes(
        about="Pairs per row that are at least so far apart, one curve for each rows set",
        x_title="distance in tokens, at least",
        x_names=[format_size(edge) for edge in edges],
        show_y=format_count,
        log_y=True,
    )
    return curve_chart(curves, axes)


def _style(number: int) -> str:
    return f"c{number % COLOURS}"
