"""`unspool look attention`: where a model's heads look in a long text, and how far."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.base.errors import ConfigError
from unspool.base.sizes import parse_size
from unspool.cli.opening import check_page, find_reading

if TYPE_CHECKING:
    from unspool.inspect.attention import ModelRef
    from unspool.inspect.attention_text import Cut, Text

ATTENTIONS = ("full", "documents")
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

        unspool look attention my-model --text book.txt --length 8K

        unspool look attention base extended --text books.jsonl.zst
        --length 32K --pieces 3 --html attention.html

        unspool look attention my-model --row runs/a/rows/utk:7 --head 22:4
    """
    from unspool.inspect.attention_watch import Look

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
    from unspool.inspect.attention import cell_of, look_at
    from unspool.inspect.attention_text import Cut

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
    if by == "share" and (look.attention != "full" or max(read.piece_docs) == 0):
        raise ConfigError(
            "--by share asks how much of far attention stays in the own document, which here is all of it; give "
            "several documents (--docs, --pieces) with --attention full, or rank by far."
        )
    seen = look_at(found, read, look, block, device=target, dtype=dtype)
    written = []
    if html is not None or svg is not None:
        from unspool.inspect.attention_page import write_attention, write_figure

        for kind, path, write in (("page", html, write_attention), ("figure", svg, write_figure)):
            if path is not None:
                write(seen, path)
                written.append(f"{kind}: {path.absolute()}")
    from unspool.inspect.attention_table import attention_values, print_attention
    from unspool.inspect.terminal import build_console

    if as_json:
        typer.echo(json.dumps(attention_values(seen), indent=1, ensure_ascii=False))
        return
    print_attention(build_console(), seen)
    if written:
        typer.echo("\n" + "\n".join(written))


def _models(refs: list[str], names: list[str] | None) -> "list[ModelRef]":
    """The models with their configs and names that tell them apart."""
    from unspool.inspect.attention import ModelRef
    from unspool.inspect.distances import unique_names
    from unspool.model.config import config_values
    from unspool.recipes.paths import resolve_path

    if names and len(names) != len(refs):
        raise ConfigError(f"--name was given {len(names)} times for {len(refs)} models; name each or none.")
    called = names or unique_names([Path(ref) for ref in refs])
    found = [resolve_path(ref, Path()) for ref in refs]
    return [ModelRef(name=name, ref=ref, values=config_values(ref)) for name, ref in zip(called, found, strict=True)]


def _files(paths: list[Path], models: "list[ModelRef]", cut: "Cut") -> "Text":
    import numpy as np

    from unspool.data.tokens import build_encoder
    from unspool.inspect.attention_text import read_files
    from unspool.model.tokenizer import load_tokenizer

    texts = [read_files(paths, build_encoder(load_tokenizer(model.ref)), cut) for model in models]
    if any(not np.array_equal(texts[0].tokens, other.tokens) for other in texts[1:]):
        raise ConfigError(
            f"{models[0].name} and {models[1].name} read this text as different tokens, so that their maps cannot be "
            "compared; look at each by itself."
        )
    return texts[0]


def _row(given: str, model: "ModelRef", cut: "Cut") -> "Text":
    from unspool.inspect.attention_text import Cut, read_row
    from unspool.inspect.rows import Rows

    if cut != Cut(seed=cut.seed):
        raise ConfigError("--docs, --length and --pieces are for --text; a row is taken as it is.")
    folder, colon, index = given.rpartition(":")
    if not colon or not index.isdigit():
        raise ConfigError(f"--row {given}: write the folder of a rows set and the number of a row, such as rows/utk:0.")
    from unspool.cli.opening import find_rows

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
