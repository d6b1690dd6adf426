"""`unspool inspect attention` and `unspool inspect distances`, and options shared with `unspool inspect rows`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size

Paths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN|DATASET…",
        help="Runs, or folders of their datasets/. Default: the current folder.",
        show_default=False,
    ),
]
Name = Annotated[list[str] | None, typer.Option(help="Name of a dataset to show. Repeatable.")]
Tokenizer = Annotated[str | None, typer.Option(help="Folder or Hub id. Default: the run's tokenizer.")]


def check_page(html: Path | None) -> None:
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html} is a folder; name the file to write, such as {html / 'inspect.html'}.")


if TYPE_CHECKING:
    from unspool.inspection.attention.input_text import Text, TextSettings
    from unspool.inspection.attention.measure import ModelRef

ATTENTIONS = ("full", "intra_document")
RANKED_BY = ("far", "same", "share")


def attention(
    models: Annotated[
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
        typer.Option(min=1, help="Number of documents, from the files in turn. Default: 4, or one per file."),
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Length of the text in tokens, such as 8K, shared among documents.")
    ] = None,
    pieces: Annotated[int, typer.Option(min=1, help="Pieces per document, shuffled.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed for --pieces.")] = 0,
    attend: Annotated[
        str | None,
        typer.Option("--attention", help="full or intra_document. Default: full, or that of the row."),
    ] = None,
    beyond: Annotated[str, typer.Option(help="Attention more than this many tokens back is long-range.")] = "1000",
    first: Annotated[
        int, typer.Option(min=0, help="First tokens that do not count as long-range: they act as attention sinks.")
    ] = 4,
    heads: Annotated[int, typer.Option(min=1, max=64, help="Number of heads to draw: the highest ranked.")] = 4,
    head: Annotated[
        list[str] | None, typer.Option(metavar="LAYER:HEAD", help="Head to draw, numbered from 0. Repeatable.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to measure, such as 20-25,29. Default: all.")] = None,
    by: Annotated[
        str,
        typer.Option(
            help="Rank heads by far (long-range attention), same (within the token's document) or share (same / far)."
        ),
    ] = "far",
    block: Annotated[int, typer.Option(min=1, max=4096, help="Tokens per side of a block.")] = 16,
    pixels: Annotated[
        int, typer.Option(min=16, max=4096, help="Maximum points per side of a map; more blocks are pooled.")
    ] = 512,
    name: Annotated[list[str] | None, typer.Option(help="Name of a model, in their order. Repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
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
    from unspool.inspection.attention.measure import AttentionSettings

    if len(models) > 2:
        raise ConfigError(f"{len(models)} models were given; give one, or two to compare.")
    if bool(text) == bool(row):
        raise ConfigError("give either --text FILE or --row DATASET:INDEX.")
    _check_choice("--attention", attend, ATTENTIONS)
    _check_choice("--by", by, RANKED_BY)
    check_page(html)
    if svg is not None and svg.is_dir():
        raise ConfigError(f"--svg {svg} is a folder; name the file to write, such as {svg / 'attention.svg'}.")
    named = tuple(_head(each) for each in head or ())
    wanted = _layers(layers) if layers else None
    far = _size("--beyond", beyond)
    most = None if length is None else _size("--length", length)

    from unspool.inspection.attention.input_text import TextSettings
    from unspool.inspection.attention.measure import cell_of, measure_attention
    from unspool.models.extend import pick_device, pick_dtype

    target = pick_device(device)
    dtype = pick_dtype(None, target)
    found = _models(models, name)
    cut = TextSettings(num_docs=docs, length=most, pieces=pieces, seed=seed)
    read = _files(text, found, cut) if text else _row(str(row), found[0], cut)
    settings = AttentionSettings(
        attention=attend or read.attention,
        beyond=far,
        first=first,
        cell=cell_of(len(read.tokens), block, pixels),
        layers=wanted,
        heads=named,
        count=heads,
        by=by,
    )
    if by == "share" and (settings.attention != "full" or max(read.chunk_ids) == 0):
        raise ConfigError(
            "--by share needs long-range attention that can leave a document; give several documents (--docs, "
            "--pieces) with --attention full, or use --by far."
        )
    measured = measure_attention(found, read, settings, block, device=target, dtype=dtype)
    written = []
    if html is not None or svg is not None:
        from unspool.inspection.attention.map_page import write_attention, write_figure

        for kind, path, write in (("page", html, write_attention), ("figure", svg, write_figure)):
            if path is not None:
                write(measured, path)
                written.append(f"{kind}: {path.absolute()}")
    from unspool.inspection.attention.map_page import attention_values, print_attention

    if as_json:
        print_json(attention_values(measured))
        return
    print_attention(PlainConsole(), measured)
    if written:
        typer.echo("\n" + "\n".join(written))


def _models(refs: list[str], names: list[str] | None) -> "list[ModelRef]":
    """The models with their configs and unique names."""
    from unspool.inspection.attention.measure import ModelRef
    from unspool.inspection.distance_view import unique_names
    from unspool.models.config import config_values
    from unspool.models.location import model_path

    if names and len(names) != len(refs):
        raise ConfigError(f"--name was given {len(names)} times for {len(refs)} models; name each or none.")
    called = names or unique_names([Path(ref) for ref in refs])
    found = [model_path(ref, Path()) for ref in refs]
    return [ModelRef(name=name, ref=ref, values=config_values(ref)) for name, ref in zip(called, found, strict=True)]


def _files(paths: list[Path], models: "list[ModelRef]", cut: "TextSettings") -> "Text":
    import numpy as np

    from unspool.data.tokenize.encoder import build_encoder
    from unspool.inspection.attention.input_text import read_files
    from unspool.models.tokenizer import load_tokenizer

    texts = [read_files(paths, build_encoder(load_tokenizer(model.ref)), cut) for model in models]
    if any(not np.array_equal(texts[0].tokens, other.tokens) for other in texts[1:]):
        raise ConfigError(
            f"{models[0].name} and {models[1].name} tokenize this text differently, so their maps cannot be "
            "compared; inspect each model separately."
        )
    return texts[0]


def _row(given: str, model: "ModelRef", cut: "TextSettings") -> "Text":
    from unspool.inspection.attention.input_text import TextSettings, read_row
    from unspool.inspection.packed_rows import Rows

    if cut != TextSettings(seed=cut.seed):
        raise ConfigError("--docs, --length and --pieces cannot be combined with --row.")
    folder, colon, index = given.rpartition(":")
    if not colon or not index.isdigit():
        raise ConfigError(f"--row {given}: write the folder of a dataset and a row index, such as datasets/utk:0.")

    from unspool.inspection.inspect_data import find_rows, load_tokenizer_of

    places = find_rows([Path(folder)], ())
    if len(places) > 1:
        there = ", ".join(str(place.path) for place in places)
        raise ConfigError(f"--row {given}: several datasets found ({there}); name one of them.")
    found_tokenizer = load_tokenizer_of(places[0], model.ref)
    return read_row(Rows(places[0], found_tokenizer), int(index), found_tokenizer.notes)


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


def _size(option: str, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {error}.") from None


def _check_choice(option: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ConfigError(f"{option} {value}: use {', '.join(allowed[:-1])} or {allowed[-1]}.")


def distances(
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
        int | None, typer.Option(min=1, help="Rows of each dataset, evenly spaced. Default: all, up to 128M tokens.")
    ] = None,
    tokenizer: Tokenizer = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page with curves to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Count pairs of tokens of one document by their distance in a row.

    Counts pairs that can attend to each other, as shares and per row.
    Special tokens and padding do not count. Several datasets are shown
    side by side.

        unspool inspect distances runs/tiny

        unspool inspect distances runs/tiny --name plain --name utk --beyond 16K

        unspool inspect distances runs/tiny/datasets/* --html distances.html
    """
    edges = [_size("--bins", value) for value in bins.split(",")] if bins else []
    thresholds = [_size("--beyond", value) for value in beyond or []]
    if edges and edges != sorted(set(edges)):
        raise ConfigError(f"--bins {bins}: edges must increase, such as 1,1K,4K,16K.")
    check_page(html)
    from unspool.inspection.inspect_data import find_rows, load_tokenizer_of

    places = find_rows(paths or [Path()], name or ())

    from unspool.data.distances import doublings
    from unspool.inspection.detokenize import FoundTokenizer
    from unspool.inspection.distance_view import count_distances, distance_values, read_text, unique_names
    from unspool.inspection.packed_rows import Rows, has_special_tokens

    names = unique_names([place.path for place in places])
    # A tokenizer takes seconds to load, and only UTK's special tokens need one.
    texts = []
    for place, label in zip(places, names, strict=True):
        found = load_tokenizer_of(place, tokenizer) if has_special_tokens(place) else FoundTokenizer()
        texts.append(read_text(Rows(place, found), label, most_rows=count))
    # Distances below the first edge get a bin of their own.
    edges = edges if edges[:1] == [1] else [1, *edges] if edges else doublings(max(text.reach for text in texts))
    counted = [count_distances(text, edges, thresholds) for text in texts]
    if html is not None:
        from unspool.inspection.distance_view import write_distances

        write_distances(counted, thresholds, html)
    if as_json:
        print_json([distance_values(each, thresholds) for each in counted])
        return
    from unspool.inspection.distance_view import print_distances

    print_distances(PlainConsole(), counted, thresholds)
    if html is not None:
        typer.echo(f"\npage: {html.absolute()}")
