"""Scores in the terminal: the cells of a summary, the means of its suites, and the effective length."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from unspool.core.formatting import MISSING, format_duration, format_percent
from unspool.core.sizes import format_size
from unspool.evals.baselines import KEY, describe_baselines
from unspool.evals.beyond_context import footnote
from unspool.evals.look_facts import TASK_TITLES

BEYOND = " †"  # marks lengths beyond the model's context
BAR = 10  # characters of a bar of 100%
COLUMNS = ("suite", "length", "positions or depth", "value", "95% interval", "n")


def print_scores(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the cells of a summary, then the means of its suites."""
    table = Table(*COLUMNS[:3])
    for column in COLUMNS[3:]:
        table.add_column(column, justify="right")
    for row in table_rows(summary):
        table.add_row(*row)
    console.print(table, highlight=True)
    _print_baselines(console, summary)
    asked = summary.get("backend", {})
    if "endpoint" in asked:
        context = f"context {asked['context']}" if asked["context"] else "context length not listed"
        console.print(
            f"server {asked['url']}: model {asked['model']}, endpoint {asked['endpoint']}, {context}, chat template "
            f"{asked['template']}",
            highlight=False,
        )
    beyond = summary.get("beyond_context")
    if beyond:
        policies = dict.fromkeys(beyond["policies"].values())
        console.print(f"{BEYOND.strip()} {'; '.join(footnote(beyond, policy) for policy in policies)}", highlight=False)
    for suite in summary.get("suites", []):
        _print_means(console, suite, beyond and beyond["context"])
        if "effective_length" in suite:
            console.print(_effective(suite), highlight=False)
        if "comparability" in suite:
            console.print(f"{suite['suite']}: {suite['comparability']}", highlight=False)


def _print_baselines(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the trivial baselines of each suite that has them."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for cell in summary["cells"]:
        if cell.get(KEY) and not cell.get("task"):
            found.setdefault(cell["suite"], {})[cell["length"]] = cell[KEY]
    for suite, by_length in found.items():
        console.print(f"{suite}: {describe_baselines(by_length)}", highlight=False)


def _effective(suite: dict[str, Any]) -> str:
    """Describe the effective length of a suite with tasks, its adaptation rate and its average."""
    length, rate = suite["effective_length"], suite["adaptation_rate"]
    holds = f"effective length {format_size(length)}" if length else "no tested length reaches the threshold"
    kept = f"; {_kept(rate)}" if rate and rate["value"] is not None else ""
    average = suite.get("average")
    if average:
        over = ", ".join(map(format_size, average["lengths"]))
        kept = f"; {average['of']} {100 * average['value']:.1f}, averaged over {over}{kept}"
    worded = f", wording {suite['wording']}" if suite.get("wording") else ""
    return f"{suite['suite']} ({suite['mode']}{worded}): {holds}{kept}"


def _kept(rate: dict[str, Any]) -> str:
    kept = f"adaptation rate {100 * rate['value']:.0f}%"
    return f"{kept} ({format_size(rate['to'])} ÷ {format_size(rate['from'])})"


def _print_means(console: Console, suite: dict[str, Any], context: int | None) -> None:
    """Print a suite's means and categories by length."""
    lengths = list(dict.fromkeys(mean["length"] for mean in suite.get("means", [])))
    names = [format_size(length) + BEYOND * (context is not None and length > context) for length in lengths]
    table = Table(suite["suite"], *names)
    for name in dict.fromkeys(mean["name"] for mean in suite.get("means", [])):
        row = [mean for mean in suite["means"] if mean["name"] == name]
        known = [mean for mean in row if mean["n"]] or row
        table.add_row(_mean_name(min(known, key=lambda mean: mean["tasks"])), *(_mean_text(mean) for mean in row))
    if lengths:
        console.print(table, highlight=False)


def _mean_name(mean: dict[str, Any]) -> str:
    if mean["name"] == "overall":
        return f"overall, mean of {mean['of_categories']} categories"
    counted = f"{mean['tasks']} task{'s' if mean['tasks'] != 1 else ''}"
    counted += f" of {mean['of_tasks']}" if mean["tasks"] < mean["of_tasks"] else ""
    return f"mean of {counted}" if mean["name"] == "mean" else f"{mean['name']}, {counted}"


def _mean_text(mean: dict[str, Any]) -> str:
    if mean["value"] is None:
        return f"– ({mean['categories']} of {mean['of_categories']} known)" if "categories" in mean else "–"
    return f"{100 * mean['value']:.1f}% ({100 * mean['low']:.0f}–{100 * mean['high']:.0f}, n {mean['n']})"


def table_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the table of scores, in the order of `COLUMNS`."""
    # Skip scores of tasks by depth: they would hide the tasks. summary.json and the report have them.
    return [
        table_row(cell)
        for cell in summary["cells"]
        if (not cell.get("task") or cell["depth"] is None) and (cell.get("depth") is None or cell["n"])
    ]


def table_row(cell: dict[str, Any]) -> tuple[str, ...]:
    """Format one cell of a summary: shares in percent, losses in nats."""

    def shown(number: float | None) -> str:
        if number is None:
            return "not judged" if cell.get("not_judged") else "–"
        return f"{number:.3f}" if cell["metric"] == "loss" else f"{100 * number:.0f}%"

    if cell["metric"] == "loss":
        part = f"{format_size(cell['from'])}–{format_size(cell['to'])}"
    elif cell["metric"] == "mean":
        part = f"mean of {cell['tasks']} task{'s' if cell['tasks'] != 1 else ''}" + (
            f" of {cell['of_tasks']}" if cell["tasks"] < cell["of_tasks"] else ""
        )
    else:
        part = "all" if cell["depth"] is None else f"depth {cell['depth']:g}"
    if cell.get("task"):
        part = f"{cell['task']} ({cell['metric']})" + ("" if part == "all" else f", {part}")
    interval = "–" if cell["low"] is None else f"{shown(cell['low'])} to {shown(cell['high'])}"
    length = (format_size(cell["length"]) if cell["length"] else "short") + BEYOND * ("beyond_context" in cell)
    return cell["suite"], length, part, shown(cell["value"]), interval, str(cell["n"])


def print_look(console: Console, facts: Mapping[str, Any]) -> None:
    """Print scores by length with bars, the notes and the conclusion."""
    rows = facts["lengths"]
    tasks = list(rows[0]["tasks"]) if rows else []
    table = Table("length", "score")
    for column in ("", "95% interval", "n", *(TASK_TITLES.get(task, task) for task in tasks)):
        table.add_column(column, justify="right")
    for row in rows:
        bar = "█" * round(BAR * row["value"])
        interval = f"{format_percent(row['low'])} to {format_percent(row['high'])}"
        cells = [row["tasks"][task] for task in tasks]
        shown = [f"{format_percent(cell['value'])} of {cell['n']}" for cell in cells]
        table.add_row(format_size(row["length"]), bar, format_percent(row["value"]), interval, str(row["n"]), *shown)
    for length in facts["not_asked"][:1]:
        more = " and longer" if len(facts["not_asked"]) > 1 else ""
        table.add_row(format_size(length) + more, "not tested", *[MISSING] * (3 + len(tasks)))
    if rows:
        console.print(table)
    for note in facts["notes"]:
        console.print(note)
    console.print(f"{facts['questions']} questions in {format_duration(facts['seconds'])}.")
    console.print(facts["sentence"])
