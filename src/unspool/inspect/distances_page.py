"""Distances of several rows sets as one HTML file: curves, and the numbers they are drawn from.

Promise: as page.py: no network, no scripts, every text escaped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from unspool import __version__
from unspool.base.html import templates_in, write_html
from unspool.base.sizes import format_count, format_size
from unspool.inspect.curves import Axes, Curve, curve_chart, marker
from unspool.inspect.distances import Distances, bin_names, show_share
from unspool.inspect.distances_table import number_tables, rows_line
from unspool.inspect.page import COLOURS
from unspool.inspect.visible import one_line

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
    write_html(out_file, render_distances(sets, beyond))


def render_distances(sets: Sequence[Distances], beyond: Sequence[int]) -> str:
    views = [_view(each, number) for number, each in enumerate(sets)]
    return (
        templates_in(Path(__file__).parent)
        .get_template("distances.html.j2")
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
