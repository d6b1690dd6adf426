"""`unspool ablate`: a study of several arms, from one file to a ranked table."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unspool.cli.recipes import Override

SOME_FAILED = 1


def ablate(
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

        unspool ablate tiny --dry-run

        unspool ablate my-study.yaml --set engine.workers=8

        unspool ablate my-study.yaml --only utk --only abf-s1

    Each run is also written out as a recipe of its own: recipes/ARM-sSEED.yaml
    in the study's folder. --set changes a value in every arm.
    """
    from unspool.recipes.study import check_study_inputs, load_study, pick_runs

    loaded = load_study(study, overrides=overrides, out=out)
    chosen = pick_runs(loaded, only)
    # Only now: it loads torch, and a mistake in a study should be told at once.
    from unspool.recipes.study_run import is_done, run_study, states

    if dry_run:
        _dry_run(loaded, chosen, as_json=as_json)
        return
    if not report_only:
        from unspool.recipes.run import pick_device

        waiting = [run for run in chosen if not is_done(loaded, run)]
        check_study_inputs(waiting)
        for run in waiting:
            pick_device(run.loaded.recipe.device)
    found = states(loaded) if report_only else run_study(loaded, chosen)
    from unspool.recipes.study_report import publish_study

    result = publish_study(loaded, found, checked=not report_only)
    if as_json:
        typer.echo(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        _show(loaded, result)
    if any(one.state == "failed" for one in found if one.run in chosen):
        raise typer.Exit(SOME_FAILED)


def _dry_run(loaded: Any, chosen: list[Any], *, as_json: bool) -> None:
    from unspool.recipes.study_plan import study_plan

    plan = study_plan(loaded, chosen)
    if as_json:
        typer.echo(json.dumps(plan, indent=1, ensure_ascii=False))
        return
    from unspool.cli.ablate_tables import plan_summary, runs_table, shared_table

    typer.echo(f"{plan['name']}, into {plan['out']}\n")
    _print(runs_table(plan), shared_table(plan))
    typer.echo(plan_summary(plan))


def _show(loaded: Any, result: dict[str, Any]) -> None:
    from unspool.cli.ablate_tables import measures_table, ranking_table
    from unspool.recipes.study_text import seeds_sentence

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
