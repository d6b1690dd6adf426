"""`unspool inspect attention`: where a model's heads look in a long text, and how far."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.core.config import nearest
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size

# What the commands of `unspool inspect` share: which rows sets are meant, and how they are read.


if TYPE_CHECKING:
    from unspool.inspection.detokenize import Reading
    from unspool.inspection.run_paths import Place

Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN|ROWS…",
        help="Runs, or folders of their datasets/; the current folder if none is given.",
        show_default=False,
    ),
]
Name = Annotated[list[str] | None, typer.Option(help="Only the rows set of this name; may be given several times.")]
Tokenizer = Annotated[str | None, typer.Option(help="A folder or Hub id; by default the one that the run names.")]


def find_rows(paths: list[Path] | None, names: list[str] | None) -> "list[Place]":
    """The rows sets in these paths, in order, or in that of `names`; ConfigError if there are none such."""
    from unspool.inspection.run_paths import boxes, find_place

    found = []
    for path in paths or [Path()]:
        place = find_place(path)
        if place.kind == "run":
            found += [find_place(box.folder) for box in boxes(path) if box.kind == "dataset"]
        elif place.kind == "dataset":
            found.append(place)
        else:
            raise ConfigError(f"{path} holds no rows; give a run or a folder of its datasets/.")
    there = [place.path.name for place in found]
    for name in names or []:
        if name not in there:
            guess = nearest(name, there)
            hint = f"did you mean {guess!r}?" if guess else f"there are {', '.join(there) or 'none'}."
            raise ConfigError(f"--name {name!r}: no rows set is called so; {hint}")
    if names:
        found = [place for name in names for place in found if place.path.name == name]
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths or [Path()]))}: no rows have been made here yet.")
    return found


def find_reading(place: "Place", tokenizer: str | None) -> "Reading":
    # Only now: tokenizers come with torch and transformers, which take seconds to import.
    from unspool.inspection.detokenize import find_tokenizer
    from unspool.recipe.paths import resolve_path

    # What is named on the command line starts from the current folder, what a recipe names also from the run's.
    root = Path() if tokenizer or place.run_dir is None else place.run_dir
    return find_tokenizer(place, tokenizer, lambda name: resolve_path(name, root))


def check_page(html: Path | None) -> None:
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html} is a folder; name the file to write, such as {html / 'look.html'}.")


if TYPE_CHECKING:
    from unspool.inspection.attention.input_text import Cut, Text
    from unspool.inspection.attention.measure import ModelRef

ATTENTIONS = ("full", "intra_document")
RANKED_BY = ("far", "same", "share")


def attention(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL [MODEL2]", help="Folders, .gguf files, Hub ids or asset:NAME; two are compared."),
    ],
    text: Annotated[
        list[Path] | None, typer.Option(help="A file such as book.txt or books.jsonl.zst. Repeatable.")
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="ROWS:INDEX", help="A row of a rows set instead of --text.")
    ] = None,
    docs: Annotated[
        int | None, typer.Option(min=1, help="How many documents of the files, in turn; 4, or one of each file.")
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Tokens of the text, such as 8K, shared among its documents.")
    ] = None,
    pieces: Annotated[int, typer.Option(min=1, help="Cut each document into so many pieces and shuffle all.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the cuts and the order of --pieces.")] = 0,
    attend: Annotated[
        str | None,
        typer.Option("--attention", help="full (default), or documents: each sees only itself; of a row, its own."),
    ] = None,
    beyond: Annotated[str, typer.Option(help="Far is what is more tokens back than this.")] = "1000",
    first: Annotated[
        int, typer.Option(min=0, help="First tokens that do not count as far: idle heads rest on them.")
    ] = 4,
    heads: Annotated[int, typer.Option(min=1, max=64, help="How many heads to draw: those that look furthest.")] = 4,
    head: Annotated[
        list[str] | None, typer.Option(metavar="LAYER:HEAD", help="Draw this one, counted from 0. Repeatable.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Look only at these, such as 20-25,29.")] = None,
    by: Annotated[
        str,
        typer.Option(
            help="Rank by far, by same: far back in the token's own document, or by share: how much of far is same."
        ),
    ] = "far",
    block: Annotated[int, typer.Option(min=1, max=4096, help="Tokens to a side of a block.")] = 16,
    pixels: Annotated[
        int, typer.Option(min=16, max=4096, help="Points to a side of a map at most; more blocks are pooled.")
    ] = 512,
    name: Annotated[list[str] | None, typer.Option(help="What to call a model, in their order. Repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the maps as one figure to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the shares of all heads as JSON.")] = False,
) -> None:
    """Where heads look in a long text, and how far back.

    Prints the heads with the most attention on tokens more than 1,000
    back, and draws maps of them: of each 16 × 16 tokens the largest
    probability, as in Figure 8 of Untie the Knots. Two models are shown
    on the same heads (those of the second that look furthest), with the
    difference. No map of all pairs is ever held.

        unspool inspect attention my-model --text book.txt --length 8K

        unspool inspect attention base extended --text books.jsonl.zst
        --length 32K --pieces 3 --html attention.html

        unspool inspect attention my-model --row runs/a/rows/utk:7 --head 22:4
    """
    from unspool.inspection.attention.measure import Look

    if len(models) > 2:
        raise ConfigError(f"{len(models)} models were given; one is looked at, or two are compared.")
    if bool(text) == bool(row):
        raise ConfigError("give either --text FILE or --row ROWS:INDEX, so that there is something to look at.")
    _check_choice("--attention", attend, ATTENTIONS)
    _check_choice("--by", by, RANKED_BY)
    check_page(html)
    if svg is not None and svg.is_dir():
        raise ConfigError(f"--svg {svg} is a folder; name the file to write, such as {svg / 'attention.svg'}.")
    named = tuple(_head(each) for each in head or ())
    wanted = _layers(layers) if layers else None
    far = _size("--beyond", beyond)
    most = None if length is None else _size("--length", length)

    from unspool.cli.eval import device_and_dtype
    from unspool.inspection.attention.input_text import Cut
    from unspool.inspection.attention.measure import cell_of, look_at

    target, dtype = device_and_dtype(device)
    found = _models(models, name)
    cut = Cut(num_docs=docs, length=most, pieces=pieces, seed=seed)
    read = _files(text, found, cut) if text else _row(str(row), found[0], cut)
    look = Look(
        attention=attend or read.attention,
        beyond=far,
        first=first,
        cell=cell_of(len(read.tokens), block, pixels),
        layers=wanted,
        heads=named,
        count=heads,
        by=by,
    )
    if by == "share" and (look.attention != "full" or max(read.chunk_ids) == 0):
        raise ConfigError(
            "--by share asks how much of far attention stays in the own document, which here is all of it; give "
            "several documents (--docs, --pieces) with --attention full, or rank by far."
        )
    seen = look_at(found, read, look, block, device=target, dtype=dtype)
    written = []
    if html is not None or svg is not None:
        from unspool.inspection.attention.map_page import write_attention, write_figure

        for kind, path, write in (("page", html, write_attention), ("figure", svg, write_figure)):
            if path is not None:
                write(seen, path)
                written.append(f"{kind}: {path.absolute()}")
    from unspool.inspection.attention.head_table import attention_values, print_attention
    from unspool.inspection.terminal import build_console

    if as_json:
        typer.echo(json.dumps(attention_values(seen), indent=1, ensure_ascii=False))
        return
    print_attention(build_console(), seen)
    if written:
        typer.echo("\n" + "\n".join(written))


def _models(refs: list[str], names: list[str] | None) -> "list[ModelRef]":
    """The models with their configs and names that tell them apart."""
    from unspool.inspection.attention.measure import ModelRef
    from unspool.inspection.distances.count import unique_names
    from unspool.models.config import config_values
    from unspool.recipe.paths import resolve_path

    if names and len(names) != len(refs):
        raise ConfigError(f"--name was given {len(names)} times for {len(refs)} models; name each or none.")
    called = names or unique_names([Path(ref) for ref in refs])
    found = [resolve_path(ref, Path()) for ref in refs]
    return [ModelRef(name=name, ref=ref, values=config_values(ref)) for name, ref in zip(called, found, strict=True)]


def _files(paths: list[Path], models: "list[ModelRef]", cut: "Cut") -> "Text":
    import numpy as np

    from unspool.data.tokenize.encoder import build_encoder
    from unspool.inspection.attention.input_text import read_files
    from unspool.models.tokenizer import load_tokenizer

    texts = [read_files(paths, build_encoder(load_tokenizer(model.ref)), cut) for model in models]
    if any(not np.array_equal(texts[0].tokens, other.tokens) for other in texts[1:]):
        raise ConfigError(
            f"{models[0].name} and {models[1].name} read this text as different tokens, so that their maps cannot be "
            "compared; look at each by itself."
        )
    return texts[0]


def _row(given: str, model: "ModelRef", cut: "Cut") -> "Text":
    from unspool.inspection.attention.input_text import Cut, read_row
    from unspool.inspection.packed_rows import Rows

    if cut != Cut(seed=cut.seed):
        raise ConfigError("--docs, --length and --pieces are for --text; a row is taken as it is.")
    folder, colon, index = given.rpartition(":")
    if not colon or not index.isdigit():
        raise ConfigError(
            f"--row {given}: write the folder of a rows set and the number of a row, such as datasets/utk:0."
        )

    places = find_rows([Path(folder)], None)
    if len(places) > 1:
        there = ", ".join(str(place.path) for place in places)
        raise ConfigError(f"--row {given}: there are several rows sets ({there}); name one of them.")
    reading = find_reading(places[0], model.ref)
    return read_row(Rows(places[0], reading), int(index), reading.notes)


def _head(value: str) -> tuple[int, int]:
    layer, colon, head = value.partition(":")
    if not (colon and layer.isdigit() and head.isdigit()):
        raise ConfigError(f"--head {value}: write layer and head, counted from 0, such as 22:4.")
    return int(layer), int(head)


def _layers(value: str) -> tuple[int, ...]:
    found: set[int] = set()
    for part in value.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or (dash and int(high) < int(low)):
            raise ConfigError(f"--layers {value}: write numbers and ranges, counted from 0, such as 20-25,29.")
        found |= set(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


def _size(option: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {error}.") from None


def _check_choice(option: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ConfigError(f"{option} {value}: use {', '.join(allowed[:-1])} or {allowed[-1]}.")


# `unspool inspect distances`: how far apart rows put tokens of one document.


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

        unspool inspect distances runs/tiny

        unspool inspect distances runs/tiny --name plain --name utk --beyond 16K

        unspool inspect distances runs/tiny/rows/* --html distances.html
    """
    edges = _sizes("--bins", bins.split(",")) if bins else []
    thresholds = _sizes("--beyond", beyond or [])
    if edges and edges != sorted(set(edges)):
        raise ConfigError(f"--bins {bins}: edges must rise, such as 1,1K,4K,16K.")
    check_page(html)
    places = find_rows(paths, name)

    from unspool.inspection.detokenize import Reading
    from unspool.inspection.distances.count import count_distances, distance_values, doublings, read_text, unique_names
    from unspool.inspection.packed_rows import Rows, is_tangled

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
        from unspool.inspection.distances.curves import write_distances

        write_distances(counted, thresholds, html)
    if as_json:
        typer.echo(json.dumps([distance_values(each, thresholds) for each in counted], indent=1, ensure_ascii=False))
        return
    from unspool.inspection.distances.count import print_distances
    from unspool.inspection.terminal import build_console

    print_distances(build_console(), counted, thresholds)
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")


def _sizes(option: str, values: list[str]) -> list[int]:
    try:
        return [parse_size(value) for value in values]
    except ValueError as error:
        raise ConfigError(f"{option} {','.join(values)}: {error}.") from None
