"""`unspool synth`: long conversations that a language model writes about documents."""

import json
from typing import Annotated, Any

import typer

from unspool.base.errors import ConfigError
from unspool.cli.recipes import Override
from unspool.cli.run import AsJson, RecipeArgument


def synth(
    recipe: RecipeArgument,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="SET", help="Only this set of the recipe. Repeatable.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Only say how much would be asked, what it costs and how long it takes.")
    ] = False,
    overrides: Override = None,
    as_json: AsJson = False,
) -> None:
    """Long instruction data from a recipe's `synth`: questions, RAG, summaries.

    A generator (a server, a model here, or a mock) reads parts of long
    documents and writes about them; what it writes is checked, and what is
    kept becomes conversations that a source of kind chat reads. Requests,
    cost and time are said first. Safe to kill and to run again: no reply is
    asked for twice. A key is read from the environment only.

        unspool synth my.yaml --estimate

        unspool synth my.yaml --only long --set synth.long.tokens=2M
    """
    prepared = _prepared(recipe, only, overrides)
    prepared.corpora()
    if estimate:
        found = prepared.estimates()
        if as_json:
            typer.echo(json.dumps({name: one.plain() for name, one in found.items()}, indent=1))
            return
        for name, one in found.items():
            typer.echo(f"{name}: {one}")
        return
    results = prepared.make()
    if as_json:
        typer.echo(json.dumps(results, indent=1))
        return
    from rich.console import Console

    from unspool.cli.synth_tables import kinds_table, notes, reasons_table

    console = Console()
    for name, result in results.items():
        console.print(kinds_table(name, result))
        if result["rejected"] or result["failed"]:
            console.print(reasons_table(result))
        for line in notes(result):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _prepared(recipe: str, only: list[str] | None, overrides: list[str] | None) -> Any:
    from unspool.recipes.check import load_recipe

    loaded = load_recipe(recipe, overrides)
    if not loaded.recipe.synth:
        raise ConfigError(f"{recipe} has no `synth`, so there is nothing to generate; see docs/synth.md for one.")
    # Only now: it loads torch, and a mistake in a recipe should be told at once.
    from unspool.recipes.synth import Synthesis

    return Synthesis(loaded, only or ())
