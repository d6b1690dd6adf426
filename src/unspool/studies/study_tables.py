"""Tables of a study for the terminal: its plan, the ranking of its arms, and the measures that rank them."""

from collections import Counter
from typing import Any

from rich.table import Table

from unspool.core.sizes import format_count

# Measures in addition to the ranking; more do not fit a terminal, and study.md has them all.
MAX_COLUMNS = 6


def runs_table(plan: dict[str, Any]) -> Table:
    table = Table("run", "state", "now", "tokens", box=None, pad_edge=False)
    for entry in plan["runs"]:
        now = "runs" if entry["will_run"] else ""
        table.add_row(entry["run"], entry["state"], now, format_count(entry["tokens"]))
    return table


def shared_table(plan: dict[str, Any]) -> Table:
    """One line per shared folder; other seeds need other folders."""
    table = Table("made once", "for runs", box=None, pad_edge=False)
    for entry in plan["shared"]:
        names = entry["runs"]
        table.add_row(f"{entry['folder']} ({entry['key'][:8]})", f"{len(names)}: {', '.join(names)}")
    return table


def plan_summary(plan: dict[str, Any]) -> str:
    uses = sum(len(entry["runs"]) for entry in plan["shared"])
    kinds = Counter(entry["folder"].split("/")[0] for entry in plan["shared"])
    made = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    todo = plan["to_run"]
    return (
        f"{todo['runs']} of {len(plan['runs'])} runs to do, {format_count(todo['tokens'])} tokens to train. "
        f"{len(plan['shared'])} shared folders serve {uses} uses ({made})."
    )


def ranking_table(result: dict[str, Any]) -> Table:
    from unspool.studies.study_report import ranking_rows

    head, rows = ranking_rows(result)
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, no_wrap=name != "verdict")
    for row in rows:
        table.add_row(*row)
    return table


def measures_table(result: dict[str, Any]) -> Table | None:
    """Arms by the measures that rank them, with a mark where the difference is significant."""
    from unspool.studies.study_report import kind_of, show_mean

    names = [name for kind in ("score", "loss") for name in result["ranked_by"][kind]][:MAX_COLUMNS]
    if len(names) < 2:
        return None
    tables = {table["measure"]: table for table in result["measures"]}
    shown = Table("arm", *names, box=None, pad_edge=False)
    for entry in result["ranking"]:
        cells = []
        for name in names:
            marks = {one["verdict"] for one in tables[name]["comparisons"] if one["arm"] == entry["arm"]}
            mark = " ▲" if "better" in marks else " ▼" if "worse" in marks else ""
            cells.append(show_mean(tables[name]["arms"][entry["arm"]], kind_of(result, name)) + mark)
        shown.add_row(entry["arm"], *cells)
    return shown
