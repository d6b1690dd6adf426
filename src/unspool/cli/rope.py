"""`unspool rope`: advice before training on extending a model to a context length."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.inspect_views import check_page
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_size, parse_size

if TYPE_CHECKING:
    from unspool.rope.advice import Advice

_SPARK = 18


def rope(
    model: Annotated[str, typer.Option(help="Hub id, folder, .gguf file or asset:NAME; only its config is read.")],
    context: Annotated[str, typer.Option(help="Context length to extend to, such as 128K.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with plots to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Advise on RoPE: bounds, settings to paste, published recipes.

    B(m) is how much higher a similar key scores than a random one at
    distance m (Men et al.). Each method is shown with the distance up to
    which B(m) is not negative. Nothing is trained and no weights are read.

        unspool rope --model HuggingFaceTB/SmolLM2-135M --context 32K

        unspool rope --model asset:tiny-base --context 8K --html page.html
    """
    try:
        context_len = parse_size(context)
    except ValueError as error:
        raise ConfigError(f"--context {context}: {error}.") from None
    check_page(html)

    from unspool.models.config import config_values
    from unspool.models.location import model_path
    from unspool.rope.advice import advise, write_advice

    values = config_values(model_path(model, Path()))
    with progress_bar("bases tried", None) as advance:
        advice = advise(values, context_len, advance=lambda done: advance(done))
    if html is not None:
        write_advice(advice, model, html)
    if as_json:
        print_json(as_plain(advice, model))
        return
    _print(advice, model)
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")


def as_plain(advice: "Advice", model: str) -> dict[str, Any]:
    from unspool.rope.advice import PUBLISHED

    return {"model": model, **asdict(advice), "published": [asdict(each) for each in PUBLISHED]}


def _print(advice: "Advice", model: str) -> None:
    from rich.table import Table

    from unspool.rope.advice import PUBLISHED, model_facts, reach_text, sparkline, verdict
    from unspool.rope.methods import ROPE_METHODS

    console = PlainConsole()
    console.print(f"{model} at {format_size(advice.context_len)}", style="bold", soft_wrap=True)
    facts = [*model_facts(advice), *verdict(advice)]
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        console.print(f"{name.ljust(width)}  {text}", soft_wrap=True)
    console.print()
    methods = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("method", "settings", "B(m) ≥ 0 up to", "lowest", f"1 … {format_size(advice.context_len)}"):
        # In a narrow window, wrap the columns that read well on two lines.
        methods.add_column(column, no_wrap=column not in ("settings", "B(m) ≥ 0 up to"))
    for each in advice.methods:
        style = "" if each.reach[0] >= advice.context_len else "yellow"
        cells = (each.summary, reach_text(each, advice), f"{100 * each.lowest:.1f}%", sparkline(each, _SPARK))
        methods.add_row(each.method, *cells, style=style)
    console.print(methods)
    console.print("lowest B(m) relative to B(0), by distance on a log scale, × where negative", style="dim")
    console.print("\nTo paste into a stage:", style="bold")
    for each in advice.methods[1:]:
        console.print(f"  {each.line}", soft_wrap=True)
    for name, method in ROPE_METHODS.items():
        if method.requirement is not None:
            console.print(f"  {name} needs {method.requirement}", soft_wrap=True)
    console.print("\nWhat published recipes used:", style="bold")
    width = max(len(used.model) for used in PUBLISHED)
    for used in PUBLISHED:
        console.print(f"  {used.model.ljust(width)}  {used.lengths}: {used.positions} ({used.source})", soft_wrap=True)
