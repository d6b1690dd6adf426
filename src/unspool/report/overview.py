"""Models side by side: by length as in Table 1 of Untie the Knots, by category as in Table 10 of ProLong.

In: models as lines of a chart. Out: tables of means with their 95% intervals.
Promise: a mean over lengths, tasks or categories is given only where none of them is missing.
"""

from collections.abc import Sequence
from dataclasses import replace

from unspool.base.sizes import format_size
from unspool.eval.helmet.suite import CATEGORIES
from unspool.report.figures import Line
from unspool.report.measures import average
from unspool.report.results import SHORT, Cell, recall_suites, task_of, task_suite
from unspool.report.tables import Entry, Table, number_entry
from unspool.report.wording import MISSING, listing, show_percent, suite_title

HELMET, RULER = "helmet", "ruler"
_HELMET_TITLES = {
    "recall": "Recall",
    "rag": "RAG",
    "rerank": "Re-rank",
    "cite": "Cite",
    "longqa": "Long QA",
    "summ": "Summaries",
    "icl": "ICL",
}


def length_table(lines: Sequence[Line], suite: str) -> Table:
    """Models × lengths, with the average and how much of the shortest length's score the longest keeps."""
    lengths = _lengths(lines, suite)
    told = [line for line in lines if any(line.scores.recall(suite, length) for length in lengths)]
    reaches = any(line.scores.holds_until.get(suite) for line in told)
    rows = []
    for line in told:
        cells = [line.scores.recall(suite, length) for length in lengths]
        mean = [number_entry(f"{line.label}, mean", average(cells))] if len(lengths) > 1 else []
        reach = line.scores.holds_until.get(suite)
        rows.append(
            [
                Entry(text=line.label),
                *(number_entry(line.label, cell) for cell in cells),
                *mean,
                *([_kept(cells[0], cells[-1])] if len(lengths) > 1 else []),
                *([Entry(text=format_size(reach) if reach else MISSING)] if reaches else []),
            ]
        )
    marked = _mark_best(rows, num_columns=len(lengths) + (len(lengths) > 1))
    ends = ["average", "kept"] if len(lengths) > 1 else []
    return Table(
        caption=f"{suite_title(suite)} by length",
        columns=["model", *map(format_size, lengths), *ends, *(["holds until"] if reaches else [])],
        rows=marked,
        note=_length_note(lengths, reaches=reaches),
    )


def _length_note(lengths: Sequence[int], *, reaches: bool) -> str:
    note = "Percent, with 95% intervals; best of each column in bold"
    if len(lengths) > 1:
        note += f"; kept: {format_size(lengths[-1])} ÷ {format_size(lengths[0])}"
    return note + ("; holds until: the longest length with a mean of at least 85.6." if reaches else ".")


def _kept(shortest: Cell | None, longest: Cell | None) -> Entry:
    if shortest is None or longest is None or not shortest.value or longest.value is None:
        return Entry(text=MISSING)
    return Entry(text=show_percent(longest.value / shortest.value))


def category_tables(lines: Sequence[Line]) -> list[Table]:
    """Models × categories: all suites beside each other, then each suite that consists of tasks, then lm-eval's."""
    whole = [suite for suite in _suites(lines) if not task_of(suite)[1]]
    with_tasks = list(dict.fromkeys(task_of(suite)[0] for suite in _suites(lines) if task_of(suite)[1]))
    tables = []
    if len(whole) > 1:
        columns = {suite_title(suite): [suite] for suite in whole}
        tables.append(_category_table(lines, columns, "All suites"))
    for suite in with_tasks:
        tables.append(_category_table(lines, _categories(lines, suite), f"{suite_title(suite)} by category"))
    return [*tables, *short_tables(lines)]


def _categories(lines: Sequence[Line], suite: str) -> dict[str, list[str]]:
    """Title of a category: its tasks, of those that any model was asked."""
    tasks = [task_of(name)[1] for name in _suites(lines) if task_of(name)[0] == suite and task_of(name)[1]]
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(_category(suite, task), []).append(task_suite(suite, task))
    order = list(_HELMET_TITLES.values()) if suite == HELMET else []
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _category(suite: str, task: str) -> str:
    if suite == HELMET:
        found = next((name for name, tasks in CATEGORIES.items() if task in tasks), None)
        return _HELMET_TITLES.get(found or "", task)
    if suite == RULER:
        # As Untie the Knots groups them in its Figure 5.
        groups = {"niah": "Needles", "vt": "Tracing", "cwe": "Counting", "fwe": "Counting", "qa": "Questions"}
        return next((title for start, title in groups.items() if task.startswith(start)), task)
    return task


def _category_table(lines: Sequence[Line], columns: dict[str, list[str]], caption: str) -> Table:
    lengths = sorted({length for suites in columns.values() for suite in suites for length in _lengths(lines, suite)})
    has_context = any(line.context for line in lines)
    rows = []
    for line in lines:
        if not any(line.scores.recall(suite, n) for suites in columns.values() for suite in suites for n in lengths):
            continue
        means = [_over_lengths(line, suites, lines) for suites in columns.values()]
        values = [number_entry(f"{line.label}, {name}", cell) for name, cell in zip(columns, means, strict=True)]
        together = [number_entry(f"{line.label}, average", average(means))] if len(columns) > 1 else []
        context = [Entry(text=format_size(line.context) if line.context else MISSING)] if has_context else []
        rows.append([Entry(text=line.label), *context, *values, *together])
    found = _mark_best(rows, num_columns=len(columns) + (len(columns) > 1), first=1 + has_context)
    names = ["model", *(["context"] if has_context else []), *columns, *(["average"] if len(columns) > 1 else [])]
    note = f"Mean over {listing([format_size(length) for length in lengths])}, with 95% intervals; best in bold."
    return Table(caption=caption, columns=names, rows=found, note=note)


def _over_lengths(line: Line, suites: Sequence[str], lines: Sequence[Line]) -> Cell | None:
    """The mean over tasks and lengths, as far as any model was asked."""
    return average([line.scores.recall(suite, length) for suite in suites for length in _lengths(lines, suite)])


def short_tables(lines: Sequence[Line]) -> list[Table]:
    """Models × tasks of lm-eval, where any were run."""
    tasks = list(dict.fromkeys(cell.suite for line in lines for cell in line.scores.short))
    if not tasks:
        return []
    rows = []
    for line in lines:
        if not line.scores.short:
            continue
        cells = [next((cell for cell in line.scores.short if cell.suite == task), None) for task in tasks]
        values = [number_entry(line.label, cell) for cell in cells]
        together = [number_entry(f"{line.label}, average", average(cells))] if len(tasks) > 1 else []
        rows.append([Entry(text=line.label), *values, *together])
    names = [task_of(task)[1] or SHORT for task in tasks]
    columns = ["model", *names, *(["average"] if len(tasks) > 1 else [])]
    found = _mark_best(rows, num_columns=len(columns) - 1)
    return [Table(caption="Short context", columns=columns, rows=found, note="lm-eval's tasks, in percent.")]


def _suites(lines: Sequence[Line]) -> list[str]:
    return recall_suites(line.scores for line in lines)


def _lengths(lines: Sequence[Line], suite: str) -> list[int]:
    return sorted({cell.length for line in lines for cell in line.scores.cells if cell.suite == suite})


def _mark_best(rows: list[list[Entry]], *, num_columns: int, first: int = 1) -> list[list[Entry]]:
    """The best of each column in bold, where models differ."""
    if len(rows) < 2:
        return rows
    marked = [list(row) for row in rows]
    for column in range(first, first + num_columns):
        values = [row[column].rank for row in rows]
        known = [value for value in values if value is not None]
        if len(set(known)) < 2:
            continue
        best = max(known)
        for row in marked:
            if row[column].rank == best:
                row[column] = replace(row[column], strong=True)
    return marked
