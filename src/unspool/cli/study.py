"""`unspool study`: run the arms of a study and rank them."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from unspool.cli.default_command import DEFAULT, DefaultGroup
from unspool.cli.recipes import Override
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError

SOME_FAILED = 1
WIDTH = 200  # of tables that are not printed to a terminal: no column is cut
# A narrow terminal wraps tables of numbers instead of cutting them.
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
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a bundled study.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ARM", help="Run only this arm, or one run ARM-sSEED. Repeatable."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="LIST", help="Seeds of every arm, such as 3,4,5, in place of the study's."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs, what they share and the tokens to train; run nothing.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Compare the runs in the folder, including copied ones; run nothing.")
    ] = False,
    overrides: Override = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the study. Default: runs/NAME.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the arms of a study under every seed, and rank them.

    An arm is one recipe with changes. Arms share corpora, datasets and the
    scores of the base model where their settings are equal. You can kill
    the command at any time and run it again. An arm that fails does not
    stop the others.

        unspool study list

        unspool study tiny --dry-run

        unspool study my-study.yaml --set engine.workers=8

        unspool study my-study.yaml --only utk --only abf-s1

        unspool study my-study.yaml --seeds 3,4,5 --out repeated

    Every run is also written as a recipe: recipes/ARM-sSEED.yaml in the
    study's folder. --set changes a value in every arm.
    """
    from unspool.studies import study as studies

    chosen = _whole_numbers(seeds)
    if dry_run:
        plan = studies.plan_study(study, overrides, only=only or (), seeds=chosen, out=out)
        if as_json:
            print_json(plan.to_dict())
        else:
            plan.print(_console())
        return
    result = studies.study(study, overrides, only=only or (), seeds=chosen, out=out, report_only=report_only)
    if as_json:
        print_json(result.to_dict())
    else:
        typer.echo("")
        result.print(_console())
    if result.failed:
        raise typer.Exit(SOME_FAILED)


def _whole_numbers(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds {text}: write whole numbers with commas, such as --seeds 3,4,5.") from None


def _console() -> PlainConsole:
    return PlainConsole(width=None if sys.stdout.isatty() else WIDTH)


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
