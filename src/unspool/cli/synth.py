"""`unspool synth`: long conversations that a language model writes about documents."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from unspool.cli.recipes import Override
from unspool.cli.run import AsJson, RecipeArgument
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_count
from unspool.synthesis.quality import REASONS


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

    console = Console()
    for name, result in results.items():
        console.print(kinds_table(name, result))
        if result["rejected"] or result["failed"]:
            console.print(reasons_table(result))
        for line in notes(result):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _prepared(recipe: str, only: list[str] | None, overrides: list[str] | None) -> Any:
    from unspool.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    if not loaded.recipe.synth:
        raise ConfigError(f"{recipe} has no `synth`, so there is nothing to generate; see docs/synth.md for one.")
    # Only now: it loads torch, and a mistake in a recipe should be told at once.
    from unspool.recipe.synthesize import Synthesis

    return Synthesis(loaded, only or ())


# The tables that `unspool synth` ends with: kinds with their shares, and why the rest was not kept.


# A share further off than this is worth a word.
TOLERANCE = 0.01


def kinds_table(name: str, result: dict[str, Any]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("kind")
    for column in ("asked", "kept", "rejected", "failed", "tokens", "share", "wanted"):
        table.add_column(column, justify="right")
    for kind, entry in result["kinds"].items():
        table.add_row(
            kind,
            str(entry["asked"]),
            str(entry["kept"]),
            str(sum(entry["rejected"].values())),
            str(sum(entry["failed"].values())),
            format_count(entry["tokens"]),
            "–" if entry["share"] is None else f"{entry['share']:.1%}",
            f"{entry['wanted_share']:.1%}",
        )
    whole = [str(result[column]) for column in ("asked", "kept", "rejected", "failed")]
    table.add_row("all", *whole, format_count(result["tokens"]), "", "", style="bold")
    return table


def reasons_table(result: dict[str, Any]) -> Table:
    table = Table(title="not kept", title_justify="left")
    table.add_column("reason")
    table.add_column("times", justify="right")
    table.add_column("meaning")
    rejected: dict[str, int] = {}
    for entry in result["kinds"].values():
        for reason, count in entry["rejected"].items():
            rejected[reason] = rejected.get(reason, 0) + count
        for reason, count in entry["failed"].items():
            rejected[f"failed: {reason}"] = rejected.get(f"failed: {reason}", 0) + count
    for reason, count in sorted(rejected.items(), key=lambda item: -item[1]):
        table.add_row(reason, str(count), REASONS.get(reason, "no answer in all attempts"))
    return table


def notes(result: dict[str, Any]) -> list[str]:
    """What a person should know besides the tables."""
    lines = []
    requests = result.get("requests")
    if requests:
        troubles = ", ".join(f"{count} {kind}" for kind, count in sorted(requests["troubles"].items())) or "none"
        lines.append(
            f"{requests['asked']} requests, {requests['known']} answered from earlier replies, "
            f"{format_count(requests['prompt_tokens'])} prompt and {format_count(requests['reply_tokens'])} reply "
            f"tokens; attempts that went wrong: {troubles}"
        )
    wanted = result["wanted_tokens"]
    if wanted and result["tokens"] < wanted * (1 - TOLERANCE):
        lines.append(
            f"the documents ended at {format_count(result['tokens'])} of {format_count(wanted)} tokens; "
            "raise per_document, lower min_tokens, or add sources"
        )
    for kind, entry in result["kinds"].items():
        if entry["share"] is not None and abs(entry["share"] - entry["wanted_share"]) > TOLERANCE:
            lines.append(f"{kind} has {entry['share']:.1%} of tokens, not {entry['wanted_share']:.1%}")
    lines.append(f"{result['folder']}: read it as {{kind: chat, path: {result['folder']}}}")
    return lines
