"""`unspool inspect`: look inside corpora, datasets and input files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli.default_command import DEFAULT, DefaultGroup
from unspool.cli.inspect_views import Name, Paths, Tokenizer, check_page, inspect_attention, inspect_distances
from unspool.core.console import PlainConsole, print_json

if TYPE_CHECKING:
    from unspool.inspection.inspect_data import Inspection

Index = Annotated[
    list[int] | None, typer.Option(help="Index of a row or document to show; the first is 0. Repeatable.")
]
Count = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of items to show: the first and random others. Default: 3, or 12 on a page."
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed for choosing which rows to show.")]
Source = Annotated[str | None, typer.Option(help="Show only rows that contain this source.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Show token borders and ids instead of text.")]
Full = Annotated[bool, typer.Option("--full", help="Show long documents in full.")]
Html = Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON, with full texts.")]


def build_group() -> typer.Typer:
    group = typer.Typer(cls=DefaultGroup, no_args_is_help=True, subcommand_metavar="")
    group.callback()(inspect)
    group.command(DEFAULT, hidden=True)(inspect_path)
    group.command("rows")(inspect_rows)
    group.command("distances")(inspect_distances)
    group.command("attention")(inspect_attention)
    return group


def inspect() -> None:
    """Inspect documents, packed rows, token distances and attention maps."""


def inspect_path(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A run, a folder of its corpus/ or datasets/, or an input file."),
    ],
    index: Index = None,
    count: Count = None,
    seed: Seed = 0,
    source: Source = None,
    tokens: Tokens = False,
    full: Full = False,
    tokenizer: Tokenizer = None,
    text: Annotated[str | None, typer.Option(help="Field or column with the text of a JSONL or Parquet file.")] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Inspect documents and packed rows.

    Shows where documents begin, end and are cut, which tokens have no loss
    (dimmed), and the special tokens of UTK. For a run's folder, the command
    lists its corpora and datasets.

        unspool inspect runs/tiny

        unspool inspect runs/tiny/datasets/utk-2k --index 7 --full

        unspool inspect runs/tiny/datasets/utk-2k --html rows.html

        unspool inspect books.jsonl.zst --tokenizer my-model --tokens

        unspool inspect rows runs/tiny --html rows.html

        unspool inspect distances runs/tiny --html distances.html

        unspool inspect attention my-model --text book.txt --html maps.html

    Write ./rows for a folder with the name of a command.
    """
    check_page(html)
    from unspool.inspection.inspect_data import ON_PAGE
    from unspool.inspection.inspect_data import inspect as find

    found = find(
        path,
        index=index or (),
        count=count or (None if html is None else ON_PAGE),
        seed=seed,
        source=source,
        tokens=tokens,
        full=full,
        tokenizer=tokenizer,
        text=text,
    )
    _show(found, html, as_json=as_json, only_one=True)


def inspect_rows(
    paths: Paths = None,
    name: Name = None,
    index: Index = None,
    count: Count = None,
    seed: Seed = 0,
    source: Source = None,
    tokens: Tokens = False,
    full: Full = False,
    tokenizer: Tokenizer = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Show packed rows with pieces colored by document.

    Each piece is shown with its part and document, its label and solution
    (UTK), and its position ids if rows skip some (PoSE). Tokens without
    loss are dimmed. All datasets of a run are shown, or those of --name.

        unspool inspect rows runs/tiny

        unspool inspect rows runs/tiny --name utk-2k --index 7

        unspool inspect rows runs/tiny/datasets/utk-2k runs/other/datasets/cip --html rows.html
    """
    check_page(html)
    from unspool.inspection import inspect_data

    found = inspect_data.inspect_rows(
        paths or ".",
        name or (),
        index=index or (),
        count=count,
        on_page=html is not None,
        seed=seed,
        source=source,
        tokens=tokens,
        full=full,
        tokenizer=tokenizer,
    )
    _show(found, html, as_json=as_json)


def _show(found: "Inspection", html: Path | None, *, as_json: bool, only_one: bool = False) -> None:
    if html is not None:
        found.save(html, "html")
        if not as_json:
            typer.echo(f"page: {html.absolute()}")
    if as_json:
        values = found.to_dict()
        print_json(values[0] if only_one and found.path is None else values)
    elif html is None:
        found.print(PlainConsole())
