"""`unspool run`, and its boxes one by one: `corpus`, `rows`, `train`."""

import json
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
    outcome = _prepared(recipe, overrides).everything()
    if as_json:
        typer.echo(json.dumps({"headline": outcome.headline, "report": str(outcome.report)}, indent=1))
        return
    typer.echo("")
    for line in outcome.headline:
        typer.echo(line)
    typer.echo(f"\nreport: {outcome.report.absolute()}")


def corpus(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """Only the first box: tokenise the documents of every source."""
    _show_counts(_prepared(recipe, overrides).corpora(), as_json=as_json)


def rows(recipe: RecipeArgument, overrides: Override = None, as_json: AsJson = False) -> None:
    """The first two boxes: documents, then the training rows made of them."""
    prepared = _prepared(recipe, overrides)
    prepared.corpora()
    _show_counts(prepared.rows(), as_json=as_json)


def train(
    recipe: RecipeArgument,
    stage: Annotated[str | None, typer.Option(help="Only this stage; all of them, in order, when not given.")] = None,
    overrides: Override = None,
) -> None:
    """Documents, rows and stages, without scores and report."""
    prepared = _prepared(recipe, overrides)
    stages = {entry.name: entry for entry in prepared.recipe.stages}
    chosen = [lookup(stages, stage, kind="stage")] if stage else list(stages.values())
    prepared.corpora()
    prepared.rows()
    for entry in chosen:
        prepared.train(entry)
        typer.echo(str((prepared.out / "stages" / entry.name / "model").absolute()))


def _prepared(recipe: str, overrides: list[str] | None) -> Any:
    from unspool.recipes.check import check_inputs, load_recipe

    loaded = load_recipe(recipe, overrides)
    check_inputs(loaded)
    # Only now: it loads torch, and a mistake in a recipe should be told at once.
    from unspool.recipes.run import Run

    return Run(loaded)


def _show_counts(counts: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(counts, indent=1))
        return
    for name, entry in counts.items():
        numbers = ", ".join(
            f"{key.replace('_', ' ')} {value:,}" for key, value in entry.items() if isinstance(value, int)
        )
        typer.echo(f"{name}: {numbers}")
