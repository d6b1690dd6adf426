"""`unspool synth`: generate long conversations about documents with a language model."""

from typing import Annotated

import typer

from unspool.cli.recipes import Override
from unspool.cli.run import AsJson, RecipeArgument
from unspool.core.console import PlainConsole, print_json


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
    for a source of kind chat. The estimate of requests, cost and time is
    printed first. You can kill the command and run it again: replies are
    cached, so no request is sent twice. API keys are read from the
    environment only.

        unspool synth my.yaml --estimate

        unspool synth my.yaml --only long --set synth.long.tokens=2M
    """
    from unspool.recipe.synthesize import synthesize

    result = synthesize(recipe, overrides, only=only or (), estimate=estimate)
    if as_json:
        print_json(result.to_dict())
    else:
        result.print(PlainConsole(highlight=True))
