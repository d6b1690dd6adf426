"""`unspool study`: run the arms of a study and rank them."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table

from unspool.cli.default_command import DEFAULT, DefaultGroup
from unspool.cli.recipes import Override
from unspool.cli.run import print_tables
from unspool.core.console import PlainConsole, print_json
from unspool.core.lock import lock_run, wait_for_lock
from unspool.core.sizes import format_count

SOME_FAILED = 1
# Measures beside the ranking; more do not fit a terminal, and study.md has them all.
MAX_COLUMNS = 6
# Tables of numbers are rather wrapped by a narrow terminal than cut.
MIN_WIDTH = 120


def build_group() -> typer.Typer:
    group = typer.Typer(cls=DefaultGroup, no_args_is_help=True, subcommand_metavar="")
    group.callback()(studies)
    group.command(DEFAULT, hidden=True)(study)
    group.command("list")(list_studies)
    group.command("show")(show)
    return group


def studies() -> None:
    """Run the arms of a study under every seed, and rank them; list the bundled studies."""


def study(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a bundled one.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ARM", help="Run only this arm, or one run ARM-sSEED. Repeatable."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs, what they share and the tokens to train; run nothing.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Compare the runs in the folder, also copied ones; run nothing.")
    ] = False,
    overrides: Override = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the study; default: runs/NAME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the arms of a study under every seed, and rank them.

    An arm is one recipe with changes. Arms share corpora, datasets and the
    scores of the base model where their settings are equal. You can kill it
    at any time and run it again; an arm that fails does not stop the others.

        unspool study list

        unspool study tiny --dry-run

        unspool study my-study.yaml --set engine.workers=8

        unspool study my-study.yaml --only utk --only abf-s1

    Every run is also written as a recipe: recipes/ARM-sSEED.yaml in the
    study's folder. --set changes a value in every arm.
    """
    from unspool.studies.load import check_study_inputs, load_study, pick_runs

    loaded = load_study(study, overrides=overrides, out=out)
    chosen = pick_runs(loaded, only)
    # Import late, so that errors in the study file appear immediately: this loads torch.
    from unspool.studies.run import is_done, run_study, states

    if dry_run:
        _dry_run(loaded, chosen, as_json=as_json)
        return
    if not report_only:
        from unspool.models.extend import pick_device

        waiting = [run for run in chosen if not is_done(loaded, run)]
        check_study_inputs(waiting)
        for run in waiting:
            pick_device(run.loaded.recipe.device)
    from unspool.studies.study_report import publish_study

    # Several processes may share the arms of a study by --only.
    with nullcontext() if report_only else lock_run(loaded.out, shared=bool(only)):
        found = states(loaded) if report_only else run_study(loaded, chosen)
        with wait_for_lock(loaded.out / ".report.lock"):
            result = publish_study(loaded, found, checked=not report_only)
    if as_json:
        print_json(result)
    else:
        _show(loaded, result)
    if any(one.state == "failed" for one in found if one.run in chosen):
        raise typer.Exit(SOME_FAILED)


def list_studies(
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the bundled studies, those of papers with the paper's own numbers."""
    from unspool.core.table import terminal_table
    from unspool.studies import paper_numbers

    found = paper_numbers.list_studies()
    if as_json:
        print_json(found)
        return
    console = PlainConsole()
    console.width = max(console.width, MIN_WIDTH)
    for entry in found:
        arms = f"{len(entry['arms'])} arms of {entry['recipe']}"
        typer.echo(f"{entry['name']}: {entry['summary']} ({arms})")
        paper = paper_numbers.read_paper(entry)
        if paper is not None:
            table = paper_numbers.paper_table(paper)
            typer.echo(f"  {table.caption}")
            console.print(Padding(terminal_table(table), (0, 0, 0, 2), expand=False))
            if table.note:
                typer.echo(f"  {table.note}")
        typer.echo("")
    typer.echo("unspool study show NAME > my-study.yaml   copies one to edit.")


def show(name: Annotated[str, typer.Argument(help="A bundled study.")]) -> None:
    """Print a bundled study."""
    from unspool.core.config import lookup
    from unspool.recipe.paths import bundled_studies

    typer.echo(lookup(bundled_studies(), name, kind="study").path.read_text(encoding="utf-8"), nl=False)


def _dry_run(loaded: Any, chosen: list[Any], *, as_json: bool) -> None:
    from unspool.studies.run import study_plan

    plan = study_plan(loaded, chosen)
    if as_json:
        print_json(plan)
        return
    typer.echo(f"{plan['name']}, into {plan['out']}\n")
    print_tables(runs_table(plan), shared_table(plan), highlight=False)
    typer.echo(plan_summary(plan))


def _show(loaded: Any, result: dict[str, Any]) -> None:
    from unspool.studies.study_report import seeds_sentence

    typer.echo("")
    print_tables(*(table for table in (ranking_table(result), measures_table(result)) if table), highlight=False)
    for kind, names in result["ranked_by"].items():
        if names:
            typer.echo(f"{kind}: the mean of {', '.join(names)}")
    typer.echo(seeds_sentence(result))
    if "paper" in result:
        typer.echo(f"beside {result['paper']['source']}: study.md and the report")
    for entry in result["runs"]:
        if entry["state"] != "finished" and not entry["compared"]:
            error = f": {entry['error'].splitlines()[0]}" if entry["error"] else ""
            typer.echo(f"{entry['run']}: {entry['state']}{error}")
    typer.echo(f"\nall numbers: {(loaded.out / 'study.md').absolute()}")
    if result["report"]:
        typer.echo(f"report: {(loaded.out / result['report']).absolute()}")


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
