"""One table class for pages, Markdown and the terminal; the macro in table.html.j2 renders it as HTML."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from unspool.core.formatting import printable

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# Characters that Markdown, or HTML inside it, could take for markup.
_MARKUP = re.compile(r"([\\`*_\[\]|~#!{}])")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table cell: the text, a smaller note after it, and a tooltip."""

    text: str
    note: str = ""
    tooltip: str = ""
    strong: bool = False
    range: tuple[float, float] | None = None  # interval for comparisons within a column


@dataclass(frozen=True, kw_only=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]  # the first entry of a row is its name
    numeric: bool = True
    note: str = ""  # how to read it
    stacked: bool = False  # show notes below the texts of cells, if both are long
    num_totals: int = 0  # number of last rows that are totals

    @property
    def body(self) -> Sequence[Sequence[Entry]]:
        return self.rows[: len(self.rows) - self.num_totals]

    @property
    def totals(self) -> Sequence[Sequence[Entry]]:
        return self.rows[len(self.rows) - self.num_totals :]

    def select(self, columns: slice) -> "Table":
        """Keep the first column and a slice of the others."""
        rows = [[row[0], *row[1:][columns]] for row in self.rows]
        return replace(self, columns=[self.columns[0], *self.columns[1:][columns]], rows=rows)


def entries(*texts: str) -> list[Entry]:
    return [Entry(text=text) for text in texts]


def escape_markdown(text: str) -> str:
    """Return the text as one line in which nothing is markup."""
    one_line = " ".join(printable(text).split())
    escaped = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", escaped)


def markdown_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = False) -> list[str]:
    """Render a Markdown table of Markdown cells; only unescaped bars are escaped."""
    ends = [" --- |" if at == 0 or not numeric else " ---: |" for at in range(len(columns))]
    return [_markdown_line(columns), "|" + "".join(ends), *(_markdown_line(row) for row in rows)]


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells) + " |"


def markdown_table(table: Table) -> str:
    """Render caption, table and note; every text is escaped."""
    rows = [[_markdown_cell(entry) for entry in row] for row in table.rows]
    lines = [f"**{escape_markdown(table.caption)}**", ""]
    lines += markdown_lines([escape_markdown(column) for column in table.columns], rows, numeric=table.numeric)
    return "\n".join([*lines, *(["", escape_markdown(table.note)] if table.note else [])])


def _markdown_cell(entry: Entry) -> str:
    text = escape_markdown(entry.text)
    shown = f"**{text}**" if entry.strong else text
    return f"{shown} ({escape_markdown(entry.note)})" if entry.note else shown


def terminal_table(table: Table, *, wrap_columns: bool = False) -> "RichTable":
    """Render the rows for a `rich` console, without caption and notes; totals and strong entries are bold."""
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, pad_edge=False)
    for at, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if at else "left", no_wrap=not (at and wrap_columns))
    first_total = len(table.rows) - table.num_totals
    for at, (name, *cells) in enumerate(table.rows):
        style = "bold" if name.strong or at >= first_total else ""
        drawn.add_row(Text(name.text, style=style), *(Text(cell.text, "bold" if cell.strong else "") for cell in cells))
    return drawn
