"""The report as Markdown: the same sections, tables and samples as the page, without the charts.

In: the view that the page is made of. Out: text for a repository, an issue or a chat.
Promise: every number of the page's tables is there, spelled the same; text of models and data can neither start
markup nor leave its cell or fence.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from unspool.base.artefact import write_atomic
from unspool.report.blocks import Asked, Block, Code, Group, PageView, RunView, Section, Text
from unspool.report.results import RunResults
from unspool.report.tables import Entry, Table
from unspool.report.view import page_view
from unspool.report.wording import plain_text

# What Markdown, or HTML inside it, could take for markup.
_MARKUP = re.compile(r"([\\`*_\[\]|~#!{}])")
_FENCE = re.compile(r"`{3,}")


def write_markdown(runs: Sequence[RunResults], out_file: Path) -> None:
    out_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out_file, render_markdown(runs).encode("utf-8", "replace").decode("utf-8"))


def render_markdown(runs: Sequence[RunResults]) -> str:
    return "\n\n".join(_page(page_view(runs))) + "\n"


def _page(page: PageView) -> Iterator[str]:
    if page.together:
        yield f"# {plain(page.title)}"
        yield from _section(page.together, 2)
    for run in page.runs:
        yield from _run(run, 1 if page.together is None else 2)
    yield f"Made by Unspool {page.version}. Intervals are 95%; “–” was not measured."


def _run(run: RunView, level: int) -> Iterator[str]:
    yield f"{'#' * level} {plain(run.name)}"
    about = [f"context {run.contexts}" if run.contexts else "", run.base_model]
    if any(about):
        yield plain(" · ".join(filter(None, about)))
    yield from (plain(line) for line in run.lines)
    yield from (f"> {plain(note)}" for note in run.notes)
    if run.tiles:
        rows = [
            [Entry(text=tile.title), Entry(text=row.model), Entry(text=row.value, note=row.detail)]
            for tile in run.tiles
            for row in tile.rows
        ]
        yield table_text(Table(caption="Before and after", columns=["measure", "model", "value"], rows=rows))
    for section in run.sections:
        yield from _section(section, level + 1)


def _section(section: Section, level: int) -> Iterator[str]:
    yield f"{'#' * level} {plain(section.title)}"
    for block in section.blocks:
        yield from _block(block, level + 1)


def _block(block: Block, level: int) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"> {plain(block.text)}" if block.role == "note" else plain(block.text)
    elif isinstance(block, Group):
        yield from (table_text(table) for table in block.tables)
    elif isinstance(block, Code):
        yield fenced(block.text)
    elif isinstance(block, Asked):
        yield f"{'#' * level} {plain(block.title)}"
        for question in block.questions:
            yield f"{plain(question.place)}, expected {quoted(question.reference)}"
            yield "\n".join(f"- {plain(a.model)} {a.mark} {quoted(a.output)}" for a in question.answers)
            if question.prompt:
                yield fenced(question.prompt)
    else:
        # Heatmaps are charts; their numbers are in the tables by length and depth.
        yield f"{plain(block.title)}: drawn on the page, in numbers under “All numbers”."


def table_text(table: Table) -> str:
    lines = [f"**{plain(table.caption)}**", ""]
    lines.append(_line([Entry(text=column) for column in table.columns]))
    ends = [" --- |" if at == 0 or not table.numeric else " ---: |" for at in range(len(table.columns))]
    lines.append("|" + "".join(ends))
    lines += [_line(row) for row in table.rows]
    return "\n".join([*lines, *(["", plain(table.note)] if table.note else [])])


def _line(row: Sequence[Entry]) -> str:
    return "| " + " | ".join(_cell(entry) for entry in row) + " |"


def _cell(entry: Entry) -> str:
    text = plain(entry.text)
    shown = f"**{text}**" if entry.strong else text
    return f"{shown} ({plain(entry.note)})" if entry.note else shown


def plain(text: str) -> str:
    """One line in which nothing is markup."""
    one_line = " ".join(plain_text(text).split())
    escaped = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", escaped)


def quoted(text: str) -> str:
    """Text of a model as code on one line; line breaks become a sign."""
    one_line = plain_text(text).replace("\n", "↵").replace("\t", " ")
    longest = max((len(run) for run in re.findall(r"`+", one_line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {one_line} {fence}"


def fenced(text: str) -> str:
    longest = max((len(run) for run in _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{plain_text(text)}\n{fence}"
