"""`unspool synth`: generate long conversations about documents with a language model."""

from collections import Counter
from typing import Annotated, Any

import typer
from rich.table import Table

from unspool.cli.recipes import Override
from unspool.cli.run import AsJson, RecipeArgument
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.lock import lock_run
from unspool.core.sizes import format_count
from unspool.synthesis.config import REJECT_REASONS

SHARE_TOLERANCE = 0.01  # a larger difference between requested and realized shares is printed


def synth(
    recipe: RecipeArgument,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="SET", help="Generate only this set. Repeatable.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the number of requests, cost and time; generate nothing.")
    ] = False,
    overrides: Override = None,
    as_json: AsJson = False,
) -> None:
    """Generate long instruction data from the `synth` section of a recipe.

    A generator (a server, a local model or a mock) reads parts of long
    documents and writes questions with answers, RAG conversations and
    summaries. Each is checked; those that pass are written as conversations
    for a source of kind chat. The command first prints an estimate of
    requests, cost and time. It can be killed and run again: replies are
    cached, so no request is sent twice. API keys are read from the
    environment only.

        unspool synth my.yaml --estimate

        unspool synth my.yaml --only long --set synth.long.tokens=2M
    """
    from unspool.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    if not loaded.recipe.synth:
        raise ConfigError(f"{recipe} has no `synth` section, so there is nothing to generate; see docs/synth.md.")
    # Import late, since it loads torch: recipe errors appear immediately.
    from unspool.recipe.synthesize import Synthesis

    with lock_run(loaded.recipe.out):
        synthesis = Synthesis(loaded, only or ())
        synthesis.corpora()
        estimates = synthesis.estimates() if estimate else {}
        results = {} if estimate else synthesis.make()
    if estimate:
        if as_json:
            print_json({name: found.plain() for name, found in estimates.items()})
            return
        for name, found in estimates.items():
            typer.echo(f"{name}: {found}")
        return
    if as_json:
        print_json(results)
        return

    console = PlainConsole(highlight=True)
    for name, result in results.items():
        console.print(kinds_table(name, result))
        if result["rejected"] or result["failed"]:
            console.print(reasons_table(result))
        for line in notes(result):
            console.print(line, highlight=False, soft_wrap=True)


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
    totals = [str(result[column]) for column in ("asked", "kept", "rejected", "failed")]
    table.add_row("total", *totals, format_count(result["tokens"]), "", "", style="bold")
    return table


def reasons_table(result: dict[str, Any]) -> Table:
    table = Table(title="not kept", title_justify="left")
    table.add_column("reason")
    table.add_column("count", justify="right")
    table.add_column("meaning")
    counts: Counter[str] = Counter()
    for entry in result["kinds"].values():
        counts.update(entry["rejected"])
        counts.update({f"failed: {kind}": count for kind, count in entry["failed"].items()})
    for reason, count in counts.most_common():
        table.add_row(reason, str(count), REJECT_REASONS.get(reason, "no reply after all attempts"))
    return table


def notes(result: dict[str, Any]) -> list[str]:
    """Lines below the tables: requests, missed targets, and how to read the result."""
    lines = []
    requests = result.get("requests")
    if requests:
        errors = ", ".join(f"{count} {kind}" for kind, count in sorted(requests["errors"].items())) or "none"
        lines.append(
            f"{requests['sent']} requests sent, {requests['cached']} replies from the cache, "
            f"{format_count(requests['prompt_tokens'])} prompt and {format_count(requests['reply_tokens'])} reply "
            f"tokens; failed attempts: {errors}"
        )
    wanted = result["wanted_tokens"]
    if wanted and result["tokens"] < wanted * (1 - SHARE_TOLERANCE):
        lines.append(
            f"the documents were used up at {format_count(result['tokens'])} of {format_count(wanted)} tokens; "
            "raise per_document, lower min_tokens, or add sources"
        )
    for kind, entry in result["kinds"].items():
        if entry["share"] is not None and abs(entry["share"] - entry["wanted_share"]) > SHARE_TOLERANCE:
            lines.append(f"{kind} has {entry['share']:.1%} of the tokens instead of {entry['wanted_share']:.1%}")
    lines.append(f"{result['folder']}: read it as {{kind: chat, path: {result['folder']}}}")
    return lines
