"""`unspool run`, and its boxes one by one: `corpus`, `rows`, `train`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from unspool.base.lookup import lookup
from unspool.cli.recipes import Override

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a bundled one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def run(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """Everything a recipe names, in order: corpus, rows, stages, scores, report.

    Safe to kill and to run again: finished parts are skipped, a half-done
    stage resumes from its last checkpoint, and what changed is redone.

        unspool run tiny

        unspool run my.yaml --set stages.0.lr=2e-5 --set out=runs/other-lr
    """
    with _ranked(recipe, overrides) as prepared:
        outcome = prepared.everything()
    if not prepared.ranks.is_leader:
        return
    if as_json:
        typer.echo(json.dumps({"headline": outcome.headline, "report": str(outcome.report)}, indent=1))
        return
    typer.echo("")
    for line in outcome.headline:
        typer.echo(line)
    typer.echo(f"\nreport: {outcome.report.absolute()}")


def corpus(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """Only the first box: read and tokenise the documents of every source.

    Shows how long the documents are and what became of every record. What
    could not be read is listed in quarantine.jsonl beside the documents.

        unspool corpus my.yaml

        unspool corpus my.yaml --set sources.web.max_bad=0.01 --json
    """
    counts = _prepared(recipe, overrides).corpora()
    if as_json:
        typer.echo(json.dumps(counts, indent=1))
        return
    from unspool.cli.data_tables import length_table, records_table

    _print(records_table(counts), length_table(counts))


def rows(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """The first two boxes: documents, then the training rows made of them.

    Shows for every rows set what it holds, how full it is, and where each
    token of its sources went: into a row, or dropped for a named reason.

        unspool rows my.yaml
    """
    prepared = _prepared(recipe, overrides)
    prepared.corpora()
    counts = prepared.rows()
    if as_json:
        typer.echo(json.dumps(counts, indent=1))
        return
    from unspool.cli.data_tables import accounting_table, rows_table, upsample_table

    upsampled = [upsample_table(counts)] if any("upsample" in entry for entry in counts.values()) else []
    accounts = (accounting_table(entry, title=name) for name, entry in counts.items())
    _print(rows_table(counts), *upsampled, *accounts)


def train(
    recipe: RecipeArgument,
    stage: Annotated[str | None, typer.Option(help="Only this stage; all of them, in order, when not given.")] = None,
    overrides: Override = None,
) -> None:
    """Documents, rows and stages, without scores and report."""
    with _ranked(recipe, overrides) as prepared:
        stages = {entry.name: entry for entry in prepared.recipe.stages}
        chosen = [lookup(stages, stage, kind="stage")] if stage else list(stages.values())
        prepared.corpora()
        prepared.rows()
        for entry in chosen:
            prepared.train(entry)
            if prepared.ranks.is_leader:
                typer.echo(str((prepared.out / "stages" / entry.name / "model").absolute()))


def _prepared(recipe: str, overrides: list[str] | None) -> Any:
    loaded = _loaded(recipe, overrides)
    from unspool.recipes.prepare import Preparation

    return Preparation(loaded)


@contextmanager
def _ranked(recipe: str, overrides: list[str] | None) -> Iterator[Any]:
    """The boxes of a recipe on this process, or on all ranks of the job that it is one of."""
    loaded = _loaded(recipe, overrides)
    # Only now: it loads torch, and a mistake in a recipe should be told at once.
    from unspool.recipes.run import Run, pick_device
    from unspool.train.ranks import ranks

    with ranks(pick_device(loaded.recipe.device).type) as these:
        yield Run(loaded, these)


def _loaded(recipe: str, overrides: list[str] | None) -> Any:
    from unspool.recipes.check import check_inputs, load_recipe

    loaded = load_recipe(recipe, overrides)
    check_inputs(loaded)
    return loaded


def _print(*tables: Any) -> None:
    from rich.console import Console

    # Wide enough for all columns where the output is not a terminal and nobody would see them cut.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    for table in tables:
        console.print(table, end="\n\n")
