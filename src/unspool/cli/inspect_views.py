"""`unspool inspect attention` and `unspool inspect distances`, and options shared with `unspool inspect rows`."""

from pathlib import Path
from typing import Annotated

import typer

from unspool.core.artifacts import check_writable
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError

Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN|DATASET…",
        help="Runs, or folders of their datasets/. Default: the current folder.",
        show_default=False,
    ),
]
Name = Annotated[list[str] | None, typer.Option(help="Name of a dataset to show. Repeatable.")]
Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer: folder or Hub id. Default: the run's.")]


def check_page(html: Path | None) -> None:
    if html is None:
        return
    if html.is_dir():
        raise ConfigError(f"--html {html} is a folder; name the file to write, such as {html / 'inspect.html'}.")
    check_writable(html, "--html")


def inspect_attention(
    model: Annotated[
        list[str],
        typer.Argument(metavar="MODEL [MODEL2]", help="Folders, .gguf files, Hub ids or asset:NAME; two are compared."),
    ],
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file such as book.txt or books.jsonl.zst. Repeatable.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="DATASET:INDEX", help="A row of a dataset instead of --text.")
    ] = None,
    docs: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of documents, from the files in turn. Default: 4, or one per file."
        ),
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Length of the text in tokens, such as 8K, shared among documents.")
    ] = None,
    pieces: Annotated[int, typer.Option(min=1, metavar="N", help="Pieces per document, shuffled.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for --pieces.")] = 0,
    attention: Annotated[
        str | None,
        typer.Option(help="Attention: full or intra_document. Default: the row's, otherwise full."),
    ] = None,
    beyond: Annotated[str, typer.Option(help="Attention more than this many tokens back is long-range.")] = "1000",
    first: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="First tokens that do not count as long-range: they act as attention sinks."
        ),
    ] = 4,
    heads: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Number of heads to draw: the highest ranked.")
    ] = 4,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYER:HEAD", help="Layer and head to draw, from 0. Repeatable."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to measure, such as 20-25,29. Default: all.")] = None,
    by: Annotated[
        str,
        typer.Option(
            help="Rank heads by far (long-range attention), same (within the token's document) or share (same / far)."
        ),
    ] = "far",
    block: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Tokens per side of a block.")] = 16,
    pixels: Annotated[
        int,
        typer.Option(min=16, max=4096, metavar="N", help="Maximum points per side of a map; more blocks are pooled."),
    ] = 512,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a model, in the order of the models. Repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the maps as one figure to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the shares of all heads as JSON.")] = False,
) -> None:
    """Measure long-range attention on a text and draw attention maps.

    Prints the heads with the most attention on tokens more than 1,000
    back and draws their maps: the largest probability in each 16 × 16
    tokens, as in Figure 8 of Untie the Knots. Two models are compared on
    the same heads (the second model's), with the difference. The full
    attention matrix is never held in memory.

        unspool inspect attention my-model --text book.txt --length 8K

        unspool inspect attention base extended --text books.jsonl.zst
        --length 32K --pieces 3 --html attention.html

        unspool inspect attention my-model --row runs/a/datasets/utk:7 --head 22:4
    """
    check_page(html)
    if svg is not None and svg.is_dir():
        raise ConfigError(f"--svg {svg} is a folder; name the file to write, such as {svg / 'attention.svg'}.")
    from unspool.inspection import inspect_attention as views

    view = views.inspect_attention(
        model,
        text or (),
        row=row,
        docs=docs,
        length=length,
        pieces=pieces,
        seed=seed,
        attention=attention,
        beyond=beyond,
        first=first,
        heads=heads,
        head=[_head(each) for each in head or ()],
        layers=_layers(layers) if layers else None,
        by=by,
        block=block,
        pixels=pixels,
        name=name or (),
        device=device,
    )
    outputs = (("page", html, "html"), ("figure", svg, "svg"))
    written = [f"{name}: {view.save(path, format).absolute()}" for name, path, format in outputs if path]
    if as_json:
        print_json(view.to_dict())
        return
    view.print(PlainConsole())
    if written:
        typer.echo("\n" + "\n".join(written))


def _head(value: str) -> tuple[int, int]:
    layer, colon, head = value.partition(":")
    if not (colon and layer.isdigit() and head.isdigit()):
        raise ConfigError(f"--head {value}: write layer and head, numbered from 0, such as 22:4.")
    return int(layer), int(head)


def _layers(value: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in value.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
            raise ConfigError(f"--layers {value}: write numbers and ranges, from 0, such as 20-25,29.")
        found |= set(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


def inspect_distances(
    paths: Paths = None,
    name: Name = None,
    bins: Annotated[
        str | None,
        typer.Option(metavar="EDGES", help="First distance of each bin, such as 1,1K,4K,16K. Default: doublings."),
    ] = None,
    beyond: Annotated[
        list[str] | None,
        typer.Option(metavar="DISTANCE", help="Also count pairs at least this far apart, such as 16K. Repeatable."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Rows of each dataset, evenly spaced. Default: all, up to 128M tokens."),
    ] = None,
    tokenizer: Tokenizer = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with curves to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Count pairs of tokens of one document by their distance in a row.

    Only pairs that can attend to each other count, and neither special
    tokens nor padding. Counts are shares of all pairs and numbers per row.
    Several datasets are shown side by side.

        unspool inspect distances runs/tiny

        unspool inspect distances runs/tiny --name plain --name utk --beyond 16K

        unspool inspect distances runs/tiny/datasets/* --html distances.html
    """
    check_page(html)
    from unspool.inspection import inspect_distances as views

    view = views.inspect_distances(
        paths or ".",
        name or (),
        bins=bins.split(",") if bins else (),
        beyond=beyond or (),
        count=count,
        tokenizer=tokenizer,
    )
    if html is not None:
        view.save(html, "html")
    if as_json:
        print_json(view.to_dict())
        return
    view.print(PlainConsole())
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")
