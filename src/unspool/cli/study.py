"""`unspool study`: a study of several arms, from one file to a ranked table."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from unspool.cli.recipes import Override
from unspool.core.sizes import format_count
from unspool.studies.result_text import kind_of, ranking_rows, show_mean

SOME_FAILED = 1


def study(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a bundled one.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ARM", help="Only this arm, or ARM-sSEED. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, what is shared and how many tokens; run nothing.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Compare what is there, also from elsewhere; run nothing.")
    ] = False,
    overrides: Override = None,
    out: Annotated[Path | None, typer.Option("--out", help="The study's folder; runs/NAME if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the arms of a study under every seed, and rank them.

    Arms are one recipe with changes. Corpora, rows and the scores of the
    untouched model are made once where arms have them in common. Safe to kill
    and to run again; an arm that fails does not stop the others.

        unspool study tiny --dry-run

        unspool study my-study.yaml --set engine.workers=8

        unspool study my-study.yaml --only utk --only abf-s1

    Each run is also written out as a recipe of its own: recipes/ARM-sSEED.yaml
    in the study's folder. --set changes a value in every arm.
    """
    from unspool.studies.load import check_study_inputs, load_study, pick_runs

    loaded = load_study(study, overrides=overrides, out=out)
    chosen = pick_runs(loaded, only)
    # Only now: it loads torch, and a mistake in a study should be told at once.
    from unspool.studies.run import is_done, run_study, states

    if dry_run:
        _dry_run(loaded, chosen, as_json=as_json)
        return
    if not report_only:
        from unspool.recipe.run import pick_device

        waiting = [run for run in chosen if not is_done(loaded, run)]
        check_study_inputs(waiting)
        for run in waiting:
            pick_device(run.loaded.recipe.device)
    found = states(loaded) if report_only else run_study(loaded, chosen)
    from unspool.studies.study_report import publish_study

    result = publish_study(loaded, found, checked=not report_only)
    if as_json:
        typer.echo(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        _show(loaded, result)
    if any(one.state == "failed" for one in found if one.run in chosen):
        raise typer.Exit(SOME_FAILED)


def _dry_run(loaded: Any, chosen: list[Any], *, as_json: bool) -> None:
    from unspool.studies.run import study_plan

    plan = study_plan(loaded, chosen)
    if as_json:
        typer.echo(json.dumps(plan, indent=1, ensure_ascii=False))
        return

    typer.echo(f"{plan['name']}, into {plan['out']}\n")
    _print(runs_table(plan), shared_table(plan))
    typer.echo(plan_summary(plan))


def _show(loaded: Any, result: dict[str, Any]) -> None:
    from unspool.studies.result_text import seeds_sentence

    typer.echo("")
    _print(*(table for table in (ranking_table(result), measures_table(result)) if table))
    for kind, names in result["ranked_by"].items():
        if names:
            typer.echo(f"{kind}: the mean of {', '.join(names)}")
    typer.echo(seeds_sentence(result))
    for entry in result["runs"]:
        if entry["state"] != "finished" and not entry["compared"]:
            error = f": {entry['error'].splitlines()[0]}" if entry["error"] else ""
            typer.echo(f"{entry['run']}: {entry['state']}{error}")
    typer.echo(f"\nall numbers: {(loaded.out / 'study.md').absolute()}")
    if result["report"]:
        typer.echo(f"report: {(loaded.out / result['report']).absolute()}")


def _print(*tables: Any) -> None:
    from rich.console import Console

    # Wide enough for all columns where the output is not a terminal and nobody would see them cut.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(width=200, highlight=False)
    for table in tables:
        console.print(table, end="\n\n")


# The tables of `unspool study`: what a study would do, and how its arms came out.


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
