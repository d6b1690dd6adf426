"""Distances between tokens of one document in packed rows, to compare datasets before and after a strategy.

Counts are exact for the counted rows, in the same bins for all datasets. Notes state which rows were counted. Results
are a table for the terminal, JSON values, or one HTML file with curves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from unspool import __version__
from unspool.core.charts import Frame, Point, Series, line_chart, swatch
from unspool.core.formatting import format_share, one_line
from unspool.core.html import load_templates
from unspool.core.sizes import format_count, format_size
from unspool.core.table import Table, entries, terminal_table
from unspool.data.distances import Stretches, count_pairs, join_rows, stretches_of
from unspool.inspection.packed_rows import Rows

# More tokens would take longer than a few seconds.
MAX_TOKENS = 1 << 27


@dataclass(frozen=True, kw_only=True)
class DatasetText:
    """The stretches of document text in a dataset's rows."""

    name: str
    path: Path
    row_len: int
    num_rows: int
    counted: int  # rows that were counted
    stretches: Stretches
    notes: list[str] = field(default_factory=list)

    @property
    def reach(self) -> int:
        """Return an upper bound of the distance between two tokens."""
        return int((self.stretches.starts + self.stretches.lens).max(initial=1))


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Pairs of tokens of one document in one row, by their distance."""

    text: DatasetText
    edges: list[int]  # a bin starts at its edge and ends before the next; the last bin is open-ended
    pairs: list[int]  # per bin, over all counted rows
    beyond: dict[int, int]  # by distance: pairs at least this far apart

    @property
    def total(self) -> int:
        return self.beyond[1]

    def share(self, pairs: int) -> float | None:
        return pairs / self.total if self.total else None

    def per_row(self, pairs: int) -> float:
        return pairs / self.text.counted

    @property
    def half(self) -> int:
        return max(1, self.text.row_len // 2)


def read_text(rows: Rows, name: str, *, most_rows: int | None = None) -> DatasetText:
    """Read all rows, or `most_rows` evenly spaced ones."""
    most = most_rows or max(1, MAX_TOKENS // rows.row_len)
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int)).tolist()
    found = []
    by_position = unknown = False
    for index in chosen:
        row = rows.row(index)
        found.append(stretches_of(row, rows.text_mask(row)))
        by_position |= row.positions is not None
        unknown |= rows.has_pieces and row.chunk_ids is None
    notes = [
        f"counted in {len(chosen):,} of {len(rows):,} rows, evenly spaced" if len(chosen) < len(rows) else "",
        "distances are differences of position ids, which these rows skip on purpose (PoSE)" if by_position else "",
        "special tokens count as text, because no tokenizer that knows them was found; give the model's tokenizer"
        if rows.has_unknown_marks
        else "",
        "the file does not record which pieces belong together, so each counts alone; run `unspool pack` again"
        if unknown
        else "",
    ]
    return DatasetText(
        name=name,
        path=rows.path,
        row_len=rows.row_len,
        num_rows=len(rows),
        counted=len(chosen),
        stretches=join_rows(found),
        notes=[note for note in notes if note],
    )


def count_distances(text: DatasetText, edges: Sequence[int], beyond: Sequence[int]) -> Distances:
    """Count pairs by distance; `edges` rise from 1, and `beyond` are further thresholds."""
    thresholds = sorted({1, max(1, text.row_len // 2), *edges, *beyond})
    counted = count_pairs(text.stretches, thresholds).tolist()
    from_here = {edge: sum(counted[place:]) for place, edge in enumerate(thresholds)}
    nexts = [*(from_here[edge] for edge in edges[1:]), 0]
    pairs = [from_here[edge] - further for edge, further in zip(edges, nexts, strict=True)]
    return Distances(text=text, edges=list(edges), pairs=pairs, beyond=from_here)


def bin_names(edges: Sequence[int], reach: int) -> list[str]:
    """Return names such as 16K–32K; the last bin has an end only if no distance exceeds twice its edge."""
    names = [format_size(edge) for edge in edges]
    last = f"{names[-1]}–{format_size(2 * edges[-1])}" if reach <= 2 * edges[-1] else f"{names[-1]} and more"
    return [*(f"{low}–{high}" for low, high in pairwise(names)), last]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return the last part of each path, with as many parents as needed to distinguish them."""
    whole = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return ["/".join(parts) for parts in whole]


def distance_values(each: Distances, beyond: Sequence[int]) -> dict[str, Any]:
    """Return the values that `--json` prints."""
    text = each.text
    return {
        "name": text.name,
        "path": str(text.path),
        "row_len": text.row_len,
        "rows": text.num_rows,
        "rows_counted": text.counted,
        "notes": text.notes,
        "pairs_per_row": each.per_row(each.total),
        "bins": [
            {"at_least": edge, "pairs_per_row": each.per_row(pairs), "share": each.share(pairs)}
            for edge, pairs in zip(each.edges, each.pairs, strict=True)
        ],
        "beyond": [
            {"at_least": edge, "pairs_per_row": each.per_row(each.beyond[edge]), "share": each.share(each.beyond[edge])}
            for edge in sorted({each.half, *beyond})
        ],
    }


def distance_tables(sets: Sequence[Distances], beyond: Sequence[int]) -> list[Table]:
    """Tabulate shares of all pairs, then pairs per row; totals are the pairs beyond each threshold."""
    names = bin_names(sets[0].edges, max(each.text.reach for each in sets))
    halves = {each.half for each in sets}
    thresholds = sorted({*beyond, *(halves if len(halves) == 1 else ())})
    bins = [(name, [each.pairs[place] for each in sets]) for place, name in enumerate(names)]
    totals = [(_beyond_name(edge, halves), [each.beyond[edge] for each in sets]) for edge in thresholds]
    if len(halves) > 1:
        totals.append(("half a row and more", [each.beyond[each.half] for each in sets]))
    everything = ("all", [each.total for each in sets])
    columns = [one_line(each.text.name) for each in sets]

    def table(title: str, last: list[tuple[str, list[int]]], show: Callable[[Distances, int], str]) -> Table:
        rows = [
            entries(name, *(show(each, count) for each, count in zip(sets, counts, strict=True)))
            for name, counts in (*bins, *last)
        ]
        return Table(caption=title, columns=[title, *columns], rows=rows, num_totals=len(last))

    return [
        table("share of pairs", totals, lambda each, count: format_share(each.share(count))),
        table("pairs per row", [*totals, everything], lambda each, count: format_count(each.per_row(count))),
    ]


def _beyond_name(edge: int, halves: set[int]) -> str:
    return f"{format_size(edge)} and more" + (" (half a row)" if halves == {edge} else "")


def describe_rows(each: Distances) -> str:
    text = each.text
    return f"{text.num_rows:,} {'row' if text.num_rows == 1 else 'rows'} of {format_size(text.row_len)} tokens"


def print_distances(console: Console, sets: Sequence[Distances], beyond: Sequence[int]) -> None:
    console.print(Text("Pairs of tokens of one document in one row, by distance", style="bold"))
    for each in sets:
        console.print(f"{one_line(each.text.name)}: {describe_rows(each)}", soft_wrap=True)
        for note in each.text.notes:
            console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    for table in distance_tables(sets, beyond):
        for columns in _fit_columns(table, console.width):
            console.print()
            console.print(terminal_table(table.select(columns)))


def _fit_columns(table: Table, width: int) -> Iterator[slice]:
    """Yield slices of columns that fit next to each other; at least one column at a time."""
    free = width - max(len(row[0].text) for row in table.rows)
    begin, left = 0, free
    for place, name in enumerate(table.columns[1:]):
        wide = 2 + max(cell_len(name), *(len(row[place + 1].text) for row in table.rows))
        if wide > left and place > begin:
            yield slice(begin, place)
            begin, left = place, free
        left -= wide
    yield slice(begin, len(table.columns) - 1)


# Bins below this share of the pairs in every dataset are only in the table.
_MIN_DRAWN_SHARE = 0.005
_MAX_LABELS = 9


@dataclass(frozen=True, kw_only=True)
class DatasetView:
    name: str
    path: str
    rows: str
    notes: list[str]
    key: Markup


def render_distances(sets: Sequence[Distances], beyond: Sequence[int]) -> str:
    views = [
        DatasetView(
            name=one_line(each.text.name),
            path=one_line(str(each.text.path)),
            rows=describe_rows(each),
            notes=[one_line(note) for note in each.text.notes],
            key=swatch(number),
        )
        for number, each in enumerate(sets)
    ]
    template = load_templates(Path(__file__).parent).get_template("distance_view.html.j2")
    return template.render(
        sets=views,
        shares=draw_shares(sets),
        tails=draw_tails(sets),
        tables=distance_tables(sets, beyond),
        version=__version__,
    )


def draw_shares(sets: Sequence[Distances]) -> Markup:
    """Draw the share of pairs in each bin."""
    first = _first_drawn(sets)
    names = bin_names(sets[0].edges, max(each.text.reach for each in sets))
    series = []
    for number, each in enumerate(sets):
        points = []
        for place in range(first, len(names)):
            share = each.share(each.pairs[place])
            tooltip = f"{each.text.name}, {names[place]}: {format_share(share)} of pairs"
            # Bins beyond the longest distance of the rows have no share, instead of a share of 0.
            known = share if each.edges[place] < each.text.reach else None
            points.append(Point(x=float(place - first), y=known, tooltip=tooltip))
        series.append(Series(label=each.text.name, style=number, points=points))
    frame = Frame(
        label="Share of pairs by distance, one curve for each dataset",
        x_title="distance in tokens, from here to the next mark",
        x_ticks=_bin_ticks(sets[0].edges[first:]),
        show_y=lambda share: f"{100 * share:.3g}%",
        y_range=(0.0, max((point.y or 0.0 for one in series for point in one.points), default=0.0) or 1.0),
        dodge=False,
    )
    return line_chart(series, frame)


def draw_tails(sets: Sequence[Distances]) -> Markup:
    """Draw the pairs per row at each distance and beyond, on a logarithmic scale."""
    edges = sets[0].edges[_first_drawn(sets) :]
    series = []
    for number, each in enumerate(sets):
        pairs = [each.per_row(each.beyond[edge]) for edge in edges]
        points = [
            Point(
                x=float(place),
                y=count if count > 0 else None,
                tooltip=f"{each.text.name}, {format_size(edge)} and more: {format_count(count)} per row",
            )
            for place, (edge, count) in enumerate(zip(edges, pairs, strict=True))
        ]
        series.append(Series(label=each.text.name, style=number, points=points))
    if all(point.y is None for one in series for point in one.points):
        return Markup("")
    frame = Frame(
        label="Pairs per row at each distance and beyond, one curve for each dataset",
        x_title="distance in tokens, at least",
        x_ticks=_bin_ticks(edges),
        show_y=format_count,
        log_y=True,
        dodge=False,
    )
    return line_chart(series, frame)


def _first_drawn(sets: Sequence[Distances]) -> int:
    """Return the first bin that is visible in any dataset; earlier bins would only be lines along the axis."""
    shares = zip(*([each.share(pairs) or 0 for pairs in each.pairs] for each in sets), strict=True)
    return next((place for place, values in enumerate(shares) if max(values) >= _MIN_DRAWN_SHARE), 0)


def _bin_ticks(edges: Sequence[int]) -> list[tuple[float, str]]:
    every = -(-len(edges) // _MAX_LABELS)
    return [(float(place), format_size(edge)) for place, edge in enumerate(edges) if place % every == 0]
