"""How far apart tokens of one document are in rows sets, to be compared: before and after a strategy.

In: opened rows sets. Out: `Distances` of each, over the same bins.
Promise: exact for the rows that were counted; how many those are, and what else a reader must know, is said.
Elsewhere: counting (data/distances.py), drawing (distances_page.py), the table (distances_table.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unspool.core.sizes import format_count, format_size
from unspool.data.distances import Stretches, count_pairs, join_rows, stretches_of
from unspool.inspection.items import one_line
from unspool.inspection.packed_rows import Rows

# Finding the marks of more tokens would take longer than a few seconds.
MOST_TOKENS = 1 << 27


@dataclass(frozen=True, kw_only=True)
class RowsText:
    """Where the text of a rows set stands."""

    name: str
    path: Path
    row_len: int
    num_rows: int
    counted: int  # rows that were looked at
    stretches: Stretches
    notes: list[str] = field(default_factory=list)

    @property
    def reach(self) -> int:
        """No two tokens are further apart."""
        return int((self.stretches.starts + self.stretches.lens).max(initial=1))


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Pairs of tokens of one document in one row, by their distance."""

    text: RowsText
    edges: list[int]  # a bin goes from its edge to below the next; the last is open
    pairs: list[int]  # per bin, over all counted rows
    beyond: dict[int, int]  # at least this far apart: pairs

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


def read_text(rows: Rows, name: str, *, most_rows: int | None = None) -> RowsText:
    """The text of all rows, or of evenly spaced ones if they are more than `most_rows`."""
    most = most_rows or max(1, MOST_TOKENS // rows.row_len)
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
        "distances are differences of positions, which these rows skip on purpose" if by_position else "",
        "its marks count as text, because no tokenizer that knows them was found; name one with --tokenizer"
        if rows.has_unknown_marks
        else "",
        "it does not record which pieces belong together, so each counts alone; build these rows again"
        if unknown
        else "",
    ]
    return RowsText(
        name=name,
        path=rows.path,
        row_len=rows.row_len,
        num_rows=len(rows),
        counted=len(chosen),
        stretches=join_rows(found),
        notes=[note for note in notes if note],
    )


def doublings(reach: int) -> list[int]:
    """1, 2, 4 … below `reach`."""
    return [1 << power for power in range(max(1, (reach - 1).bit_length()))]


def count_distances(text: RowsText, edges: Sequence[int], beyond: Sequence[int]) -> Distances:
    """`edges` rise from 1 on; `beyond` are distances to count from, beside 1 and half a row."""
    thresholds = sorted({1, max(1, text.row_len // 2), *edges, *beyond})
    counted = count_pairs(text.stretches, thresholds).tolist()
    from_here = {edge: sum(counted[place:]) for place, edge in enumerate(thresholds)}
    nexts = [*(from_here[edge] for edge in edges[1:]), 0]
    pairs = [from_here[edge] - further for edge, further in zip(edges, nexts, strict=True)]
    return Distances(text=text, edges=list(edges), pairs=pairs, beyond=from_here)


def bin_names(edges: Sequence[int], reach: int) -> list[str]:
    """Such as 16K–32K; the last one has an end only if it is a doubling that nothing is beyond."""
    names = [format_size(edge) for edge in edges]
    last = f"{names[-1]}–{format_size(2 * edges[-1])}" if reach <= 2 * edges[-1] else f"{names[-1]} and more"
    return [*(f"{low}–{high}" for low, high in pairwise(names)), last]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """The last part of each path, and as much before it as tells them apart."""
    whole = [path.absolute().parts for path in paths]
    for depth in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return ["/".join(parts) for parts in whole]


def show_share(share: float | None) -> str:
    """A share that is not 0 never looks like it."""
    if share is None:
        return "–"
    if 0 < share < 0.0001:
        return "<0.01%"
    return f"{100 * share:.1f}%" if share >= 0.01 or not share else f"{100 * share:.2f}%"


def distance_values(each: Distances, beyond: Sequence[int]) -> dict[str, Any]:
    """For `--json`."""
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


# Distances as numbers in rows and columns: the same table for the terminal and the page.


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """One cell per rows set in each line."""

    title: str
    bins: list[tuple[str, list[str]]]
    beyond: list[tuple[str, list[str]]]


def number_tables(sets: Sequence[Distances], beyond: Sequence[int]) -> list[Numbers]:
    """Shares of all pairs, then pairs per row."""
    names = bin_names(sets[0].edges, max(each.text.reach for each in sets))
    halves = {each.half for each in sets}
    asked = sorted({*beyond, *(halves if len(halves) == 1 else ())})
    further = [(_beyond_name(edge, halves), [each.beyond[edge] for each in sets]) for edge in asked]
    if len(halves) > 1:
        further.append(("half a row and more", [each.beyond[each.half] for each in sets]))
    lines = [(name, [each.pairs[place] for each in sets]) for place, name in enumerate(names)]
    everything = ("all", [each.total for each in sets])

    def shares(of: list[tuple[str, list[int]]]) -> list[tuple[str, list[str]]]:
        return [(name, [show_share(s.share(n)) for s, n in zip(sets, counts, strict=True)]) for name, counts in of]

    def per_row(of: list[tuple[str, list[int]]]) -> list[tuple[str, list[str]]]:
        return [(name, [format_count(s.per_row(n)) for s, n in zip(sets, counts, strict=True)]) for name, counts in of]

    return [
        Numbers(title="share of pairs", bins=shares(lines), beyond=shares(further)),
        Numbers(title="pairs per row", bins=per_row(lines), beyond=per_row([*further, everything])),
    ]


def _beyond_name(edge: int, halves: set[int]) -> str:
    return f"{format_size(edge)} and more" + (" (half a row)" if halves == {edge} else "")


def rows_line(each: Distances) -> str:
    text = each.text
    return f"{text.num_rows:,} {'row' if text.num_rows == 1 else 'rows'} of {format_size(text.row_len)} tokens"


def print_distances(console: Console, sets: Sequence[Distances], beyond: Sequence[int]) -> None:
    console.print(Text("Pairs of tokens of one document in one row, by distance", style="bold"))
    for each in sets:
        console.print(f"{one_line(each.text.name)}: {rows_line(each)}", soft_wrap=True)
        for note in each.text.notes:
            console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    for numbers in number_tables(sets, beyond):
        for columns in _fitting([each.text.name for each in sets], numbers, console.width):
            console.print()
            table = Table(box=None, pad_edge=False)
            table.add_column(numbers.title, no_wrap=True)
            for each in sets[columns]:
                table.add_column(one_line(each.text.name), justify="right", no_wrap=True)
            for name, cells in numbers.bins:
                table.add_row(name, *cells[columns])
            for name, cells in numbers.beyond:
                table.add_row(Text(name, style="bold"), *cells[columns])
            console.print(table)


def _fitting(names: Sequence[str], numbers: Numbers, width: int) -> Iterator[slice]:
    """Which columns stand beside each other, so that none is cut; at least one at a time."""
    lines = [*numbers.bins, *numbers.beyond]
    left = width - max(len(name) for name, _ in lines)
    begin, room = 0, left
    for place, name in enumerate(names):
        wide = 2 + max(cell_len(one_line(name)), *(len(cells[place]) for _, cells in lines))
        if wide > room and place > begin:
            yield slice(begin, place)
            begin, room = place, left
        room -= wide
    yield slice(begin, len(names))
