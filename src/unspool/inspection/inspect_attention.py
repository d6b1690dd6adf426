"""`unspool.inspect_attention`: which heads attend far back, and maps of what they attend to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from unspool.core.errors import ConfigError
from unspool.core.result import Result
from unspool.core.sizes import parse_size
from unspool.data.tokenize.encoder import build_encoder
from unspool.evals.averaged_run import run_model_path
from unspool.inspection.attention.input_text import Text, TextSettings, read_files, read_row
from unspool.inspection.distance_view import unique_names
from unspool.inspection.inspect_data import find_rows, load_tokenizer_of
from unspool.inspection.packed_rows import Rows
from unspool.models.config import config_values
from unspool.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from unspool.inspection.attention.measure import Attention, ModelRef

ATTENTIONS = ("full", "intra_document")
RANKED_BY = ("far", "same", "share")


@dataclass(frozen=True, kw_only=True)
class AttentionView(Result):
    """Long-range attention of every head, with maps, as `inspect_attention` returns it. Notebooks show the page.

    Example:
        >>> import tempfile, unspool
        >>> from pathlib import Path
        >>> book = Path(tempfile.mkdtemp(), "book.txt")
        >>> _ = book.write_text("The ship sailed on. The sea was calm. " * 20)
        >>> view = unspool.inspect_attention("asset:tiny-base", book, length=128, beyond=32, device="cpu")
        >>> view.to_dict()["tokens"]
        128
    """

    measured: "Attention"

    def print(self, console: Console) -> None:
        from unspool.inspection.attention.map_page import print_attention

        print_attention(console, self.measured)

    def to_dict(self) -> dict[str, Any]:
        """The shares of all heads, without the maps."""
        from unspool.inspection.attention.map_page import attention_values

        return attention_values(self.measured)

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        from unspool.inspection.attention.map_page import render_attention
        from unspool.inspection.attention.maps import render_figure

        return {"html": lambda: render_attention(self.measured), "svg": lambda: render_figure(self.measured)}


def inspect_attention(
    model: str | Path | Sequence[str | Path],
    text: str | Path | Sequence[str | Path] = (),
    *,
    row: str | None = None,
    docs: int | None = None,
    length: int | str | None = None,
    pieces: int = 1,
    seed: int = 0,
    attention: str | None = None,
    beyond: int | str = 1000,
    first: int = 4,
    heads: int = 4,
    head: Sequence[tuple[int, int]] = (),
    layers: Sequence[int] | None = None,
    by: str = "far",
    block: int = 16,
    pixels: int = 512,
    name: Sequence[str] = (),
    device: str = "auto",
) -> AttentionView:
    """Measure long-range attention on a text, and map the heads that attend farthest.

    A map shows the largest probability in each block of 16 × 16 tokens, as Figure 8 of Untie the Knots does. The full
    attention matrix is never held in memory.

    Args:
        model: A model folder, a run, a `.gguf` file, a Hub id or `asset:tiny-base`; two of them to compare their heads.
        text: Text file such as book.txt or books.jsonl.zst, or several.
        row: A row of a packed dataset instead of `text`, such as `runs/a/datasets/utk:7`.
        docs: Number of documents, from the files in turn; 4 by default, or one per file.
        length: Length of the text in tokens, such as `"8K"`, shared among the documents.
        pieces: Pieces per document, shuffled.
        seed: Random seed for `pieces`.
        attention: `full` or `intra_document`; by default `full`, or that of the row.
        beyond: Attention more than this many tokens back is long-range.
        first: First tokens that do not count as long-range, because they act as attention sinks.
        heads: Number of heads to draw: the highest ranked.
        head: Heads to draw, each as (layer, head) from 0.
        layers: Layers to measure; all by default.
        by: Rank heads by `far` (long-range attention), `same` (within the token's document) or `share` (same / far).
        block: Tokens per side of a block.
        pixels: Maximum points per side of a map; more blocks are pooled.
        name: A name for each model; by default its folder's.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        The view: print it, `save` it as a page or figure, or take `to_dict()`.

    Raises:
        ConfigError: The text is too short for `beyond`, or the models cannot be compared.
        DataError: A file holds no text.

    Example:
        >>> import tempfile, unspool
        >>> from pathlib import Path
        >>> book = Path(tempfile.mkdtemp(), "book.txt")
        >>> _ = book.write_text("The ship sailed on. The sea was calm. " * 20)
        >>> view = unspool.inspect_attention("asset:tiny-base", book, length=128, beyond=32, device="cpu")
        >>> "more than 32 back" in view.table()
        True
    """
    refs = [str(each) for each in ([model] if isinstance(model, str | Path) else model)]
    files = [Path(each) for each in ([text] if isinstance(text, str | Path) else text)]
    if not 1 <= len(refs) <= 2:
        raise ConfigError(f"{len(refs)} models were given; give one, or two to compare.")
    if bool(files) == bool(row):
        raise ConfigError("give either `text` or `row`.")
    _check_choice("attention", attention, ATTENTIONS)
    _check_choice("by", by, RANKED_BY)
    far = read_size("beyond", beyond)
    cut = TextSettings(
        num_docs=docs, length=None if length is None else read_size("length", length), pieces=pieces, seed=seed
    )
    from unspool.inspection.attention.measure import AttentionSettings, cell_of, measure_attention
    from unspool.models.extend import pick_device, pick_dtype  # import late: these load torch

    target = pick_device(device)
    models = _models(refs, name)
    read = _read_row(str(row), models[0], cut) if row else _read_files(files, models, cut)
    settings = AttentionSettings(
        attention=attention or read.attention,
        beyond=far,
        first=first,
        cell=cell_of(len(read.tokens), block, pixels),
        layers=None if layers is None else tuple(layers),
        heads=tuple(head),
        count=heads,
        by=by,
    )
    if by == "share" and (settings.attention != "full" or max(read.chunk_ids) == 0):
        raise ConfigError(
            "`by='share'` needs long-range attention that can leave a document; give several documents (`docs`, "
            "`pieces`) with `attention='full'`, or use `by='far'`."
        )
    return AttentionView(
        measured=measure_attention(models, read, settings, block, device=target, dtype=pick_dtype(None, target))
    )


def read_size(argument: str, value: int | str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigError(f"`{argument}={value!r}`: {error}.") from None


def _check_choice(argument: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ConfigError(f"`{argument}={value!r}`: use {', '.join(allowed[:-1])} or {allowed[-1]}.")


def _models(refs: Sequence[str], names: Sequence[str]) -> "list[ModelRef]":
    """The models with their configs and unique names."""
    from unspool.inspection.attention.measure import ModelRef

    if names and len(names) != len(refs):
        raise ConfigError(f"`name` was given {len(names)} times for {len(refs)} models; name each or none.")
    called = names or unique_names([Path(ref) for ref in refs])
    found = [run_model_path(ref, Path()) for ref in refs]
    return [ModelRef(name=name, ref=ref, values=config_values(ref)) for name, ref in zip(called, found, strict=True)]


def _read_files(paths: Sequence[Path], models: "Sequence[ModelRef]", cut: TextSettings) -> Text:
    texts = [read_files(paths, build_encoder(load_tokenizer(model.ref)), cut) for model in models]
    if any(not np.array_equal(texts[0].tokens, other.tokens) for other in texts[1:]):
        raise ConfigError(
            f"{models[0].name} and {models[1].name} tokenize this text differently, so their maps cannot be "
            "compared; inspect each model separately."
        )
    return texts[0]


def _read_row(given: str, model: "ModelRef", cut: TextSettings) -> Text:
    if cut != TextSettings(seed=cut.seed):
        raise ConfigError("`docs`, `length` and `pieces` cannot be combined with `row`.")
    folder, colon, index = given.rpartition(":")
    if not colon or not index.isdigit():
        raise ConfigError(f"`row={given!r}`: write the folder of a dataset and a row index, such as datasets/utk:0.")
    places = find_rows([Path(folder)], ())
    if len(places) > 1:
        there = ", ".join(str(place.path) for place in places)
        raise ConfigError(f"`row={given!r}`: several datasets found ({there}); name one of them.")
    tokenizer = load_tokenizer_of(places[0], model.ref)
    return read_row(Rows(places[0], tokenizer), int(index), tokenizer.notes)
