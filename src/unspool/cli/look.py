"""`unspool look`: see inside corpora, rows and input files."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.base.errors import ConfigError

if TYPE_CHECKING:
    from unspool.inspect.collection import Collection
    from unspool.inspect.place import Place
    from unspool.inspect.reading import Reading

# How many rows or documents are shown when --count is not given.
IN_TERMINAL, ON_PAGE = 3, 12


def look(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A run, a folder of its corpus/ or rows/, or an input file."),
    ],
    index: Annotated[
        list[int] | None, typer.Option(help="Show this one, counted from 0; may be given several times.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="How many: the first, others by chance; 3 if not given, 12 on a page."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Other seeds show others.")] = 0,
    source: Annotated[str | None, typer.Option(help="Only rows that hold something from this source.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token borders and ids instead of text.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Leave nothing out of long documents.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="A folder or Hub id; by default the one that the run names.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The field or column that holds the text of a JSONL or Parquet file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, texts in full.")] = False,
) -> None:
    """See inside documents and rows.

    Shows where documents begin, end and are cut, which tokens have no
    loss (dimmed), and the marks of tangled rows. A run's folder lists
    what there is to look at.

        unspool look runs/tiny

        unspool look runs/tiny/rows/utk-2k --index 7 --full

        unspool look runs/tiny/rows/utk-2k --html rows.html

        unspool look books.jsonl.zst --tokenizer my-model --tokens
    """
    from unspool.inspect.place import find_place

    # A terminal that cannot show a character must not end the command.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    place = find_place(path)
    if place.kind == "run":
        _list(place, source, html=html, as_json=as_json)
        return
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html} is a folder; name the file to write, such as {html / 'look.html'}.")
    collection = _opened(place, tokenizer=tokenizer, field=text, seed=seed)
    wanted = count or (IN_TERMINAL if html is None else ON_PAGE)
    chosen = collection.pick(indices=index or [], count=wanted, seed=seed, source=source)
    if html is not None:
        from unspool.inspect.page import write_page

        write_page(collection, chosen, html, tokens=tokens, full=full)
    if as_json:
        typer.echo(json.dumps(_values(collection, chosen, tokens=tokens), indent=1, ensure_ascii=False))
    elif html is not None:
        typer.echo(f"page: {html.absolute()}")
    else:
        _print(collection, chosen, tokens=tokens, full=full)


def _opened(place: "Place", *, tokenizer: str | None, field: str | None, seed: int) -> "Collection":
    if place.kind == "records":
        from unspool.inspect.reading import Reading
        from unspool.inspect.records import Records

        reading = _reading(place, tokenizer) if tokenizer else Reading()
        return Records(place, reading, field=field, seed=seed)
    if field is not None:
        raise ConfigError("--text is for JSONL and Parquet files; what is in a run's folder is tokenised already.")
    reading = _reading(place, tokenizer)
    if place.kind == "rows":
        from unspool.inspect.rows import Rows

        return Rows(place, reading)
    from unspool.inspect.corpus import Corpus

    return Corpus(place, reading)


def _reading(place: "Place", tokenizer: str | None) -> "Reading":
    # Only now: tokenizers come with torch and transformers, which take seconds to import.
    from unspool.inspect.tokenizer import find_tokenizer
    from unspool.recipes.paths import resolve_path

    # What is named on the command line starts from the current folder, what a recipe names also from the run's.
    root = Path() if tokenizer or place.run_dir is None else place.run_dir
    return find_tokenizer(place, tokenizer, lambda name: resolve_path(name, root))


def _print(collection: "Collection", chosen: list[int], *, tokens: bool, full: bool) -> None:
    from dataclasses import replace

    from unspool.inspect.terminal import SHORT, build_console, print_item, print_summary
    from unspool.inspect.views import Show

    console = build_console()
    print_summary(console, collection.summary())
    show = Show(tokens=tokens) if full else replace(SHORT, tokens=tokens)
    for index in chosen:
        print_item(console, collection.item(index, show), full=full)


def _values(collection: "Collection", chosen: list[int], *, tokens: bool) -> dict[str, Any]:
    from unspool.inspect.plain import item_values, summary_values
    from unspool.inspect.views import Show

    items = [item_values(collection.item(index, Show(tokens=tokens)), "index") for index in chosen]
    return summary_values(collection.summary()) | {"items": items}


def _list(place: "Place", source: str | None, *, html: Path | None, as_json: bool) -> None:
    from unspool.inspect.listing import list_run, sources_of
    from unspool.inspect.plain import listing_values
    from unspool.inspect.terminal import build_console, print_listing

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
