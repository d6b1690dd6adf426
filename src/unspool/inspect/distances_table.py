"""Distances as numbers in rows and columns: the same table for the terminal and the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unspool.base.sizes import format_count, format_size
from unspool.inspect.distances import Distances, bin_names, show_share
from unspool.inspect.visible import one_line


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
