"""`unspool look distances`: how far apart rows put tokens of one document."""

import json
from pathlib import Path
from typing import Annotated

import typer

from unspool.base.errors import ConfigError
from unspool.base.sizes import parse_size
from unspool.cli.opening import Name, Paths, Tokenizer, check_page, find_reading, find_rows


def distances(
    paths: Paths = None,
    name: Name = None,
    bins: Annotated[
        str | None,
        typer.Option(metavar="EDGES", help="Where bins begin, such as 1,1K,4K,16K; doublings if not given."),
    ] = None,
    beyond: Annotated[
        list[str] | None,
        typer.Option(metavar="DISTANCE", help="Also count pairs this far apart and more, such as 16K. Repeatable."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="How many rows of each set, evenly spaced; all up to 128M tokens.")
    ] = None,
    tokenizer: Tokenizer = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with curves to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """How far apart rows put tokens of one document.

    Counts all pairs of tokens of one document that are in one row and can
    attend to each other, by their distance: as shares, and per row. Marks
    and padding do not count. Several rows sets are shown side by side.

        unspool look distances runs/tiny

        unspool look distances runs/tiny --name plain --name utk --beyond 16K

        unspool look distances runs/tiny/rows/* --html distances.html
    """
    edges = _sizes("--bins", bins.split(",")) if bins else []
    thresholds = _sizes("--beyond", beyond or [])
    if edges and edges != sorted(set(edges)):
        raise ConfigError(f"--bins {bins}: edges must rise, such as 1,1K,4K,16K.")
    check_page(html)
    places = find_rows(paths, name)

    from unspool.inspect.distances import count_distances, distance_values, doublings, read_text, unique_names
    from unspool.inspect.reading import Reading
    from unspool.inspect.rows import Rows, is_tangled

    names = unique_names([place.path for place in places])
    # A tokenizer takes seconds to load, and only marks need one.
    readings = [find_reading(place, tokenizer) if is_tangled(place) else Reading() for place in places]
    texts = [
        read_text(Rows(place, reading), label, most_rows=count)
        for place, reading, label in zip(places, readings, names, strict=True)
    ]
    # Nothing is left out: what is nearer than the first edge has a bin of its own.
    edges = edges if edges[:1] == [1] else [1, *edges] if edges else doublings(max(text.reach for text in texts))
    counted = [count_distances(text, edges, thresholds) for text in texts]
    if html is not None:
        from unspool.inspect.distances_page import write_distances

        write_distances(counted, thresholds, html)
    if as_json:
        typer.echo(json.dumps([distance_values(each, thresholds) for each in counted], indent=1, ensure_ascii=False))
        return
    from unspool.inspect.distances_table import print_distances
    from unspool.inspect.terminal import build_console

    print_distances(build_console(), counted, thresholds)
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")


def _sizes(option: str, values: list[str]) -> list[int]:
    try:
        return [parse_size(value) for value in values]
    except ValueError as error:
        raise ConfigError(f"{option} {','.join(values)}: {error}.") from None
