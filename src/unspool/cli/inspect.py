"""`unspool inspect`: see inside corpora, rows and input files."""

import copy
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from unspool.cli.inspect_views import Name, Paths, Tokenizer, attention, check_page, distances, find_reading, find_rows
from unspool.core.errors import ConfigError

if TYPE_CHECKING:
    from unspool.inspection.input_documents import Collection
    from unspool.inspection.run_paths import Place

# How many rows or documents are shown when --count is not given: of one set, and of each of several.
IN_TERMINAL, ON_PAGE = 3, 12
OF_EACH = 1
# What is looked at if none of the commands is named.
DEFAULT = "at"

Index = Annotated[list[int] | None, typer.Option(help="Show this one, counted from 0; may be given several times.")]
Count = Annotated[
    int | None, typer.Option(min=1, help="How many: the first, others by chance; 3 if not given, 12 on a page.")
]
Seed = Annotated[int, typer.Option(help="Other seeds show others.")]
Source = Annotated[str | None, typer.Option(help="Only rows that hold something from this source.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Show token borders and ids instead of text.")]
Full = Annotated[bool, typer.Option("--full", help="Leave nothing out of long documents.")]
Html = Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON, texts in full.")]


class Look(TyperGroup):
    """`unspool inspect PATH` beside `unspool inspect COMMAND …`: what is no command is a path."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # With the options that a path takes, which a reader of `look --help` wants to see.
        whole = copy.copy(self)
        whole.help, whole.params = self.commands[DEFAULT].help, self.commands[DEFAULT].params
        TyperGroup.format_help(whole, ctx, formatter)


def build_group() -> typer.Typer:
    group = typer.Typer(cls=Look, no_args_is_help=True, subcommand_metavar="")
    group.callback()(look)
    group.command(DEFAULT, hidden=True)(look_at)
    group.command("rows")(look_rows)
    group.command("distances")(distances)
    group.command("attention")(attention)
    return group


def look() -> None:
    """See inside documents and rows, how far apart rows put what belongs together, and where models look."""


def look_at(
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
    text: Annotated[
        str | None, typer.Option(help="The field or column that holds the text of a JSONL or Parquet file.")
    ] = None,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """See inside documents and rows.

    Shows where documents begin, end and are cut, which tokens have no
    loss (dimmed), and the marks of tangled rows. A run's folder lists
    what there is to look at.

        unspool inspect runs/tiny

        unspool inspect runs/tiny/rows/utk-2k --index 7 --full

        unspool inspect runs/tiny/rows/utk-2k --html rows.html

        unspool inspect books.jsonl.zst --tokenizer my-model --tokens

        unspool inspect rows runs/tiny --html rows.html

        unspool inspect distances runs/tiny --html distances.html

        unspool inspect attention my-model --text book.txt --html maps.html

    A folder that is called as one of the commands is reached as ./rows.
    """
    from unspool.inspection.run_paths import find_place

    _keep_printing()
    place = find_place(path)
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
        typer.echo(json.dumps(values, indent=1, ensure_ascii=False))
    elif html is None:
        _print(chosen, tokens=tokens, full=full)


def look_rows(
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
    """See rows, their pieces coloured by document.

    For each piece: which part of which document it is, its label and
    solution, its knots, its positions if rows skip some, and (dimmed) the
    tokens without loss. Of a run all rows sets, or those that --name picks.

        unspool inspect rows runs/tiny

        unspool inspect rows runs/tiny --name utk-2k --index 7

        unspool inspect rows runs/tiny/rows/utk-2k runs/other/rows/cip --html rows.html
    """
    from unspool.inspection.packed_rows import Rows

    _keep_printing()
    check_page(html)
    places = find_rows(paths, name)
    few = OF_EACH if html is None else max(2, ON_PAGE // len(places))
    wanted = count or ((IN_TERMINAL if html is None else ON_PAGE) if len(places) == 1 else few)
    chosen: list[tuple[Collection, list[int]]] = []
    for place in places:
        rows = Rows(place, find_reading(place, tokenizer))
        chosen.append((rows, rows.pick(indices=index or [], count=wanted, seed=seed, source=source)))
    _write(chosen, html, tokens=tokens, full=full, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(_values(chosen, tokens=tokens), indent=1, ensure_ascii=False))
    elif html is None:
        _print(chosen, tokens=tokens, full=full)


def _keep_printing() -> None:
    # A terminal that cannot show a character must not end the command.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _write(
    chosen: "list[tuple[Collection, list[int]]]", html: Path | None, *, tokens: bool, full: bool, quiet: bool
) -> None:
    if html is None:
        return
    from unspool.inspection.viewer_page import write_page

    write_page(chosen, html, tokens=tokens, full=full)
    if not quiet:
        typer.echo(f"page: {html.absolute()}")


def _opened(place: "Place", *, tokenizer: str | None, field: str | None, seed: int) -> "Collection":
    if place.kind == "records":
        from unspool.inspection.detokenize import Reading
        from unspool.inspection.input_documents import Records

        reading = find_reading(place, tokenizer) if tokenizer else Reading()
        return Records(place, reading, field=field, seed=seed)
    if field is not None:
        raise ConfigError("--text is for JSONL and Parquet files; what is in a run's folder is tokenised already.")
    reading = find_reading(place, tokenizer)
    if place.kind == "dataset":
        from unspool.inspection.packed_rows import Rows

        return Rows(place, reading)
    from unspool.inspection.input_documents import Corpus

    return Corpus(place, reading)


def _print(chosen: "list[tuple[Collection, list[int]]]", *, tokens: bool, full: bool) -> None:
    from dataclasses import replace

    from unspool.inspection.items import Show
    from unspool.inspection.terminal import SHORT, build_console, print_item, print_summary

    console = build_console()
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
        | {"items": [item_values(collection.item(index, Show(tokens=tokens)), "index") for index in indices]}
        for collection, indices in chosen
    ]


def _list(place: "Place", source: str | None, *, html: Path | None, as_json: bool) -> None:
    from unspool.inspection.items import listing_values
    from unspool.inspection.run_paths import list_run, sources_of
    from unspool.inspection.terminal import build_console, print_listing

    entries = list_run(place.path, source)
    if not entries:
        there = ", ".join(sources_of(place.path))
        raise ConfigError(f"--source {source!r}: nothing in {place.path} was made from it; there are {there}.")
    if html is not None:
        raise ConfigError(f"--html shows one folder; give one of those in {place.path}, such as {entries[-1].name}.")
    if as_json:
        typer.echo(json.dumps(listing_values(entries), indent=1, ensure_ascii=False))
    else:
        print_listing(build_console(), str(place.path), entries)
