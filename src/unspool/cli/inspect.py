"""`unspool inspect`: look inside corpora, datasets and input files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.default_command import DEFAULT, DefaultGroup
from unspool.cli.inspect_views import (
    Name,
    Paths,
    Tokenizer,
    attention,
    check_page,
    distances,
    find_rows,
    load_tokenizer_of,
)
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError

if TYPE_CHECKING:
    from unspool.inspection.input_documents import Collection
    from unspool.inspection.run_paths import DataPath

# Defaults of --count: for one dataset in the terminal and on a page, and for each of several in the terminal.
IN_TERMINAL, ON_PAGE = 3, 12
OF_EACH = 1

Index = Annotated[list[int] | None, typer.Option(help="Index of a row or document to show, from 0. Repeatable.")]
Count = Annotated[
    int | None, typer.Option(min=1, help="Number to show: the first and random others. Default: 3, or 12 on a page.")
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
    group.command("distances")(distances)
    group.command("attention")(attention)
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

    Shows where documents begin, end and are cut, which tokens have no
    loss (dimmed), and the special tokens of UTK. For a run's folder,
    lists its corpora and datasets.

        unspool inspect runs/tiny

        unspool inspect runs/tiny/datasets/utk-2k --index 7 --full

        unspool inspect runs/tiny/datasets/utk-2k --html rows.html

        unspool inspect books.jsonl.zst --tokenizer my-model --tokens

        unspool inspect rows runs/tiny --html rows.html

        unspool inspect distances runs/tiny --html distances.html

        unspool inspect attention my-model --text book.txt --html maps.html

    Write ./rows for a folder that has the name of a command.
    """
    from unspool.inspection.run_paths import find_data

    place = find_data(path)
    if place.kind == "run":
        _list(place, source, html=html, as_json=as_json)
        return
    check_page(html)
    collection = _opened(place, tokenizer=tokenizer, field=text, seed=seed)
    wanted = count or (IN_TERMINAL if html is None else ON_PAGE)
    chosen = [(collection, collection.pick(indices=index or [], count=wanted, seed=seed, source=source))]
    _write(chosen, html, tokens=tokens, full=full, quiet=as_json)
    if as_json:
        (values,) = _values(chosen, tokens=tokens)
        print_json(values)
    elif html is None:
        _print(chosen, tokens=tokens, full=full)


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

    For each piece: its part and document, its label and solution (UTK),
    its position ids if rows skip some (PoSE), and (dimmed) the tokens
    without loss. Shows all datasets of a run, or those named by --name.

        unspool inspect rows runs/tiny

        unspool inspect rows runs/tiny --name utk-2k --index 7

        unspool inspect rows runs/tiny/datasets/utk-2k runs/other/datasets/cip --html rows.html
    """
    from unspool.inspection.packed_rows import Rows

    check_page(html)
    places = find_rows(paths, name)
    few = OF_EACH if html is None else max(2, ON_PAGE // len(places))
    wanted = count or ((IN_TERMINAL if html is None else ON_PAGE) if len(places) == 1 else few)
    chosen: list[tuple[Collection, list[int]]] = []
    for place in places:
        rows = Rows(place, load_tokenizer_of(place, tokenizer))
        chosen.append((rows, rows.pick(indices=index or [], count=wanted, seed=seed, source=source)))
    _write(chosen, html, tokens=tokens, full=full, quiet=as_json)
    if as_json:
        print_json(_values(chosen, tokens=tokens))
    elif html is None:
        _print(chosen, tokens=tokens, full=full)


def _write(
    chosen: "list[tuple[Collection, list[int]]]", html: Path | None, *, tokens: bool, full: bool, quiet: bool
) -> None:
    if html is None:
        return
    from unspool.inspection.viewer_page import write_page

    write_page(chosen, html, tokens=tokens, full=full)
    if not quiet:
        typer.echo(f"page: {html.absolute()}")


def _opened(place: "DataPath", *, tokenizer: str | None, field: str | None, seed: int) -> "Collection":
    if place.kind == "records":
        from unspool.inspection.detokenize import FoundTokenizer
        from unspool.inspection.input_documents import Records

        found_tokenizer = load_tokenizer_of(place, tokenizer) if tokenizer else FoundTokenizer()
        return Records(place, found_tokenizer, field=field, seed=seed)
    if field is not None:
        raise ConfigError("--text is for JSONL and Parquet files; data in a run's folder is already tokenized.")
    found_tokenizer = load_tokenizer_of(place, tokenizer)
    if place.kind == "dataset":
        from unspool.inspection.packed_rows import Rows

        return Rows(place, found_tokenizer)
    from unspool.inspection.input_documents import Corpus

    return Corpus(place, found_tokenizer)


def _print(chosen: "list[tuple[Collection, list[int]]]", *, tokens: bool, full: bool) -> None:
    from dataclasses import replace

    from unspool.inspection.items import Show
    from unspool.inspection.terminal import SHORT, print_item, print_summary

    console = PlainConsole()
    show = Show(tokens=tokens) if full else replace(SHORT, tokens=tokens)
    for number, (collection, indices) in enumerate(chosen):
        if number:
            console.print("\n")
        print_summary(console, collection.summary())
        for index in indices:
            print_item(console, collection.item(index, show), full=full)


def _values(chosen: "list[tuple[Collection, list[int]]]", *, tokens: bool) -> list[dict[str, Any]]:
    from unspool.inspection.items import Show, item_values, summary_values

    return [
        summary_values(collection.summary())
        | {"items": [item_values(collection.item(index, Show(tokens=tokens))) for index in indices]}
        for collection, indices in chosen
    ]


def _list(place: "DataPath", source: str | None, *, html: Path | None, as_json: bool) -> None:
    from unspool.inspection.items import listing_values
    from unspool.inspection.run_paths import list_run, sources_of
    from unspool.inspection.terminal import print_listing

    entries = list_run(place.path, source)
    if not entries:
        there = ", ".join(sources_of(place.path))
        raise ConfigError(f"--source {source!r}: nothing in {place.path} contains it; sources are {there}.")
    if html is not None:
        raise ConfigError(f"--html needs one folder; give one of those in {place.path}, such as {entries[-1].name}.")
    if as_json:
        print_json(listing_values(entries))
    else:
        print_listing(PlainConsole(), str(place.path), entries)
