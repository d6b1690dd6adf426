"""Tables that compare models: by length (UtK, Table 1) and by category (ProLong, Table 10).

Tables show means with 95% intervals. A mean over lengths, tasks or categories appears only if no part is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unspool.core.charts import Axis, Dot, Figure, Span, scatter
from unspool.core.formatting import MISSING, format_percent, join_words
from unspool.core.sizes import format_size
from unspool.core.table import Entry, Table
from unspool.evals.baselines import describe_baselines
from unspool.evals.scoring.effective_length import rate_lengths
from unspool.evals.suites.helmet.suite import CATEGORIES
from unspool.reporting.figures import Line, number_entry
from unspool.reporting.measures import Measure, average, format_with_interval, lowercase_start
from unspool.reporting.run_results import SHORT, Cell, is_part, recall_suites, task_of, task_suite
from unspool.reporting.suite_titles import HELMET_CATEGORY_TITLES, RULER_TASK_GROUPS, suite_title

HELMET, RULER = "helmet", "ruler"
_BOLD = "bold: the best model, if its interval is above all others"


def length_table(lines: Sequence[Line], suite: str) -> Table:
    """Table of models × lengths, with the average and the adaptation rate (target ÷ reference score)."""
    lengths = _lengths(lines, suite)
    scored = [line for line in lines if any(line.scores.recall(suite, length) for length in lengths)]
    reaches = any(line.scores.holds_until.get(suite) for line in scored)
    chosen = next((found for line in scored if (found := line.scores.rates.get(suite))), None)
    rate = chosen or (rate_lengths(lengths) if lengths else (0, 0))
    rows = []
    for line in scored:
        cells = [line.scores.recall(suite, length) for length in lengths]
        mean = [number_entry(f"{line.label}, mean", average(cells))] if len(lengths) > 1 else []
        reach = line.scores.holds_until.get(suite)
        rows.append(
            [
                Entry(text=line.label),
                *(number_entry(line.label, cell) for cell in cells),
                *mean,
                *([_kept(*(line.scores.recall(suite, length) for length in rate))] if len(lengths) > 1 else []),
                *([Entry(text=format_size(reach) if reach else MISSING)] if reaches else []),
            ]
        )
    marked = _mark_best(rows, num_columns=len(lengths) + (len(lengths) > 1))
    ends = ["average", "adaptation rate"] if len(lengths) > 1 else []
    return Table(
        caption=f"{suite_title(suite)} by length",
        columns=["model", *map(format_size, lengths), *ends, *(["effective length"] if reaches else [])],
        rows=marked,
        note=_length_note(rate if len(lengths) > 1 else None, reaches=reaches)
        + _comparability(scored, suite)
        + _baselines(scored, suite),
    )


def _comparability(lines: Sequence[Line], suite: str) -> str:
    """Whether the scores are comparable with published ones: one sentence, or one per model."""
    said = {line.label: found for line in lines if (found := line.scores.comparability.get(suite))}
    if len(set(said.values())) > 1:
        return "".join(f" {label}: {found}." for label, found in said.items())
    return "".join(f" {found[0].upper()}{found[1:]}." for found in dict.fromkeys(said.values()))


def _baselines(lines: Sequence[Line], suite: str) -> str:
    """The trivial baselines of a suite. They belong to its questions, so any model's are taken."""
    cells = [cell for line in lines for cell in line.scores.cells if cell.suite == suite and cell.depth is None]
    known = {cell.length: cell.baselines for cell in cells if cell.baselines}
    said = describe_baselines(known) if known else ""
    return f" {said[0].upper()}{said[1:]}." if said else ""


def _length_note(rate: tuple[int, int] | None, *, reaches: bool) -> str:
    note = f"Percent, with 95% intervals; {_BOLD}"
    if rate:
        note += f"; adaptation rate: score at {format_size(rate[0])} ÷ score at {format_size(rate[1])}"
    return note + ("; effective length: the longest length with a mean of at least 85.6." if reaches else ".")


def _kept(target: Cell | None, reference: Cell | None) -> Entry:
    if target is None or reference is None or not reference.value or target.value is None:
        return Entry(text=MISSING)
    return Entry(text=format_percent(target.value / reference.value))


def category_tables(lines: Sequence[Line]) -> list[Table]:
    """Tables of models × categories: all suites, then each suite of tasks, then lm-eval tasks."""
    whole = [suite for suite in _suites(lines) if not task_of(suite)[1]]
    with_tasks = list(dict.fromkeys(task_of(suite)[0] for suite in _suites(lines) if task_of(suite)[1]))
    tables = []
    if len(whole) > 1:
        columns = {suite_title(suite): [suite] for suite in whole}
        tables.append(_category_table(lines, columns, "All suites"))
    for suite in with_tasks:
        table = _category_table(lines, _categories(lines, suite), f"{suite_title(suite)} by category")
        tables.append(replace(table, note=table.note + _mixed_averages(lines, suite)))
    return [*tables, *short_tables(lines)]


def _mixed_averages(lines: Sequence[Line], suite: str) -> str:
    """Sentence on averages in which some tasks use other lengths; it follows a table's note."""
    found = [(line.label, *line.scores.mixed_averages[suite]) for line in lines if suite in line.scores.mixed_averages]
    if not found:
        return ""
    lengths = join_words([format_size(length) for length in found[0][2]])
    each = ", ".join(f"{label} {100 * value:.1f}" for label, value, _ in found)
    return f" Average in which some tasks use other lengths ({lengths}): {each}."


def _categories(lines: Sequence[Line], suite: str) -> dict[str, list[str]]:
    """Category titles with their scored tasks."""
    tasks = [task_of(name)[1] for name in _suites(lines) if task_of(name)[0] == suite and task_of(name)[1]]
    groups: dict[str, list[str]] = {}
    for task in tasks:
        groups.setdefault(_category(suite, task), []).append(task_suite(suite, task))
    order = list(HELMET_CATEGORY_TITLES.values()) if suite == HELMET else []
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _category(suite: str, task: str) -> str:
    if suite == HELMET:
        found = next((name for name, tasks in CATEGORIES.items() if task in tasks), None)
        return HELMET_CATEGORY_TITLES.get(found or "", task)
    if suite == RULER:
        return next((title for start, title in RULER_TASK_GROUPS.items() if task.startswith(start)), task)
    return task


def _category_table(lines: Sequence[Line], columns: dict[str, list[str]], caption: str) -> Table:
    asked = [{length for suite in suites for length in _lengths(lines, suite)} for suites in columns.values()]
    # Use only lengths that all categories have (ProLong scores some at 512K), so that the means are comparable.
    lengths = sorted(set.intersection(*asked) or set.union(*asked))
    has_context = any(line.context for line in lines)
    rows = []
    for line in lines:
        if not any(line.scores.recall(suite, n) for suites in columns.values() for suite in suites for n in lengths):
            continue
        means = [_over_lengths(line, suites, lines, lengths) for suites in columns.values()]
        values = [number_entry(f"{line.label}, {name}", cell) for name, cell in zip(columns, means, strict=True)]
        # Parts of a task, such as one depth of a search, are already in the task.
        whole = [mean for mean, suites in zip(means, columns.values(), strict=True) if not all(map(is_part, suites))]
        together = [number_entry(f"{line.label}, average", average(whole))] if len(columns) > 1 else []
        context = [Entry(text=format_size(line.context) if line.context else MISSING)] if has_context else []
        rows.append([Entry(text=line.label), *context, *values, *together])
    found = _mark_best(rows, num_columns=len(columns) + (len(columns) > 1), first=1 + has_context)
    names = ["model", *(["context"] if has_context else []), *columns, *(["average"] if len(columns) > 1 else [])]
    note = f"Mean over {join_words([format_size(length) for length in lengths])}, with 95% intervals; {_BOLD}."
    return Table(caption=caption, columns=names, rows=found, note=note)


def _over_lengths(line: Line, suites: Sequence[str], lines: Sequence[Line], among: Sequence[int]) -> Cell | None:
    """Mean over tasks and over those given lengths at which any model was scored."""
    asked = [(suite, length) for suite in suites for length in _lengths(lines, suite) if length in among]
    return average([line.scores.recall(suite, length) for suite, length in asked])


def short_tables(lines: Sequence[Line]) -> list[Table]:
    """Table of models × lm-eval tasks, if any were run."""
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
    return [Table(caption="Short context", columns=columns, rows=found, note=f"lm-eval tasks, in percent; {_BOLD}.")]


def _suites(lines: Sequence[Line]) -> list[str]:
    return recall_suites(line.scores for line in lines)


def _lengths(lines: Sequence[Line], suite: str) -> list[int]:
    return sorted({cell.length for line in lines for cell in line.scores.cells if cell.suite == suite})


def _mark_best(rows: list[list[Entry]], *, num_columns: int, first: int = 1) -> list[list[Entry]]:
    """Make the best entry of a column bold if its interval is above all other intervals."""
    marked = [list(row) for row in rows]
    for column in range(first, first + num_columns):
        ranges = [row[column].range for row in rows if row[column].text != MISSING]
        known = [one for one in ranges if one is not None]
        if len(known) < 2 or len(known) < len(ranges):
            continue
        best, *others = sorted(known, reverse=True)
        if best[0] > max(high for _, high in others):
            for row in marked:
                if row[column].range == best:
                    row[column] = replace(row[column], strong=True)
    return marked


MAX_FIGURES = 4


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """Long-context scores plotted against scores inside the original context."""

    figures: list[Figure]
    table: Table


def trade_off(lines: Sequence[Line], measures: Sequence[Measure]) -> TradeOff | None:
    """Compare long-context and short-context scores; None if fewer than two models have both."""
    short_title, short = _short_side(lines, measures)
    longs = [measure for measure in measures if not measure.title.startswith("Loss inside")]
    figures = []
    for measure in longs[:MAX_FIGURES]:
        both = [line for line in lines if _known(short.get(line.label)) and _known(measure.cells.get(line.label))]
        if len(both) > 1:
            figures.append(_figure(both, measure, short_title, short))
    if not figures:
        return None
    rows = [
        [
            Entry(text=line.label),
            number_entry(line.label, short.get(line.label)),
            *(number_entry(line.label, measure.cells.get(line.label)) for measure in longs),
        ]
        for line in lines
    ]
    columns = ["model", short_title, *(measure.title for measure in longs)]
    return TradeOff(figures=figures, table=Table(caption="Long and short context", columns=columns, rows=rows))


def _short_side(lines: Sequence[Line], measures: Sequence[Measure]) -> tuple[str, dict[str, Cell | None]]:
    scored = [line for line in lines if line.scores.short]
    tasks = {cell.suite for line in scored for cell in line.scores.short}
    if len(scored) > 1:
        means = {line.label: average(list(line.scores.short)) for line in scored}
        same = {line.label: means[line.label] for line in scored if {c.suite for c in line.scores.short} == tasks}
        return f"Short tasks (mean of {len(tasks)})", dict(same)
    inside = next((measure for measure in measures if measure.title.startswith("Loss inside")), None)
    return (inside.title, dict(inside.cells)) if inside else ("Short context", {})


def _known(cell: Cell | None) -> bool:
    return cell is not None and cell.value is not None


def _figure(lines: Sequence[Line], measure: Measure, short_title: str, short: dict[str, Cell | None]) -> Figure:
    dots = []
    for line in lines:
        x, y = short[line.label], measure.cells[line.label]
        assert x is not None and y is not None, "the caller filters models without both"
        tooltip = f"{line.label}: {short_title} {format_with_interval(x)}, {measure.title} {format_with_interval(y)}"
        dots.append(Dot(label=line.label, style=line.style, x=_range(x), y=_range(y), tooltip=tooltip))
    axes = (_axis(short_title, short[lines[0].label]), _axis(measure.title, measure.cells[lines[0].label]))
    label = f"{measure.title} against {short_title}, one point per model; the table below has the same numbers."
    return Figure(
        title=f"{measure.title} against {lowercase_start(short_title)}",
        note="better is up and to the right",
        drawing=scatter(dots, axes, label),
    )


def _range(cell: Cell) -> Span:
    assert cell.value is not None
    return Span(value=cell.value, low=cell.low, high=cell.high)


def _axis(title: str, cell: Cell | None) -> Axis:
    is_loss = cell is not None and cell.is_loss
    return Axis(
        title=f"{title}{', lower is better' if is_loss else ''}",
        show=(lambda value: f"{value:g}") if is_loss else (lambda value: f"{100 * value:g}%"),
        lower_is_better=is_loss,
    )
