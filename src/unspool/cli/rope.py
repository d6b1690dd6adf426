"""`unspool rope`: advice before training on extending a model to a context length."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.cli.inspect_views import check_page
from unspool.core.console import PlainConsole, print_json


def rope(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file or asset:NAME; only its config is read.")],
    context_length: Annotated[str, typer.Option("--context", help="Context length to extend to, such as 128K.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Advise on RoPE settings for a longer context: bounds, settings, published recipes.

    B(m) is how much higher a similar key scores than a random one at
    distance m (Men et al.). Each method is shown with the distance up to
    which B(m) is not negative. Nothing is trained and no weights are read.

        unspool rope --model HuggingFaceTB/SmolLM2-135M --context 32K

        unspool rope --model asset:tiny-base --context 8K --html page.html
    """
    check_page(html)
    from unspool.models.advise_rope import advise_rope

    advice = advise_rope(model, context_length)
    if html is not None:
        advice.save(html, "html")
    if as_json:
        print_json(advice.to_dict())
        return
    advice.print(PlainConsole())
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")
