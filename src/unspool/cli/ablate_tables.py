"""The tables of `unspool ablate`: what a study would do, and how its arms came out."""

from collections import Counter
from typing import Any

from rich.table import Table

from unspool.base.sizes import format_count
from unspool.recipes.study_text import kind_of, ranking_rows, show_mean

# Measures beside the ranking; more would not fit a terminal, and study.md has them all.
MOST_COLUMNS = 6


def runs_table(plan: dict[str, Any]) -> Table:
    table = Table("run", "state", "now", "tokens", box=None, pad_edge=False)
    for entry in plan["runs"]:
        now = "runs" if entry["will_run"] else ""
        table.add_row(entry["run"], entry["state"], now, format_count(entry["tokens"]))
    return table


def shared_table(plan: dict[str, Any]) -> Table:
    """One line for each thing that is made; those under several seeds are several things."""
    table = Table("made once", "for runs", box=None, pad_edge=False)
    for entry in plan["shared"]:
        names = entry["runs"]
        table.add_row(f"{entry['box']} ({entry['key'][:8]})", f"{len(names)}: {', '.join(names)}")
    return table


def plan_summary(plan: dict[str, Any]) -> str:
    boxes = sum(len(entry["runs"]) for entry in plan["shared"])
    kinds = Counter(entry["box"].split("/")[0] for entry in plan["shared"])
    made = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    todo = plan["to_run"]
    return (
        f"{todo['runs']} of {len(plan['runs'])} runs to do, {format_count(todo['tokens'])} tokens to train. "
        f"{len(plan['shared'])} boxes serve {boxes} uses ({made})."
    )


def ranking_table(result: dict[str, Any]) -> Table:
    head, rows = ranking_rows(result)
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name, no_wrap=name != "verdict")
    for row in rows:
        table.add_row(*row)
    return table


def measures_table(result: dict[str, Any]) -> Table | None:
    """Arms by the measures that rank them, each with a mark where it surely differs from what it is compared with."""
    names = [name for kind in ("score", "loss") for name in result["ranked_by"][kind]][:MOST_COLUMNS]
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
