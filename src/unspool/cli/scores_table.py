"""The cells of a summary as a table in the terminal."""

from typing import Any

from unspool.base.sizes import format_size


def print_table(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("suite", "length", "positions or depth")
    for column in ("value", "95% interval", "n"):
        table.add_column(column, justify="right")
    for cell in summary["cells"]:
        # Depths of many tasks would bury the tasks; they stand in summary.json and in the report.
        if not cell.get("task") or cell["depth"] is None:
            table.add_row(*table_row(cell))
    console = Console()
    console.print(table)
    for suite in summary.get("suites", []):
        length, rate = suite["effective_length"], suite["adaptation_rate"]
        holds = f"holds up to {format_size(length)}" if length else "does not hold at any length"
        kept = f"; {100 * rate['value']:.0f}% of its score is kept" if rate and rate["value"] is not None else ""
        console.print(f"{suite['suite']} ({suite['mode']}): {holds}{kept}", highlight=False)


def table_row(cell: dict[str, Any]) -> tuple[str, ...]:
    """One cell of a summary for reading: shares in percent, losses in nats."""

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
    length = format_size(cell["length"]) if cell["length"] else "short"
    return cell["suite"], length, part, shown(cell["value"]), interval, str(cell["n"])
