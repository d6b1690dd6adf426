"""Attention of one model or two on the same text: measured, with maps of the same heads.

In: names of models, a text, what to look at. Out: `Attention`.
Promise: everything that can be refused is refused before weights are loaded; models are in memory one at a time.
The heads that are drawn are those of the last model that look furthest, or those that are named.
Elsewhere: the pass over a text (attention_watch.py), pages and figures (attention_page.py, attention_figure.py),
tables (attention_table.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.core.progress import progress_bar
from unspool.inspection.attention.input_text import Text
from unspool.inspection.attention.tiles import Far, Layer, build_sight, draw, measure
from unspool.models.attention.reference import AttentionInputs, Kernel
from unspool.models.checks import intercept_attention
from unspool.models.load import load_model

# One pass of a model over a text, watched: how far every head looks, and maps of the heads that look furthest.


Head = tuple[int, int]  # layer and head, counted from 0

# Of a head that hardly looks back, the share says nothing: it is a ratio of two small numbers.
LEAST_FAR = 0.05


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is measured and drawn."""

    attention: str  # "full" or "intra_document"
    beyond: int  # tokens; what is further back is far
    first: int  # tokens at the start that count apart
    cell: int  # tokens to a side of what becomes one point of a map
    layers: tuple[int, ...] | None = None  # all if None
    heads: tuple[Head, ...] = ()  # to draw; if empty, the `count` that look furthest
    count: int = 4
    by: str = "far"  # what heads are ranked by: "far", "same" or "share"


@dataclass(kw_only=True)
class Seen:
    """What one model did with the text; lists are by layer, then by head, None where a layer was not measured."""

    far: list[list[float] | None] = field(default_factory=list)
    same: list[list[float] | None] = field(default_factory=list)
    first: list[list[float] | None] = field(default_factory=list)
    maps: dict[Head, np.ndarray] = field(default_factory=dict)  # float32[C, C], best first unless heads were named
    by: str = "far"

    def far_of(self, head: Head) -> float | None:
        return _of(self.far, head)

    def same_of(self, head: Head) -> float | None:
        return _of(self.same, head)

    def first_of(self, head: Head) -> float | None:
        return _of(self.first, head)

    @property
    def share(self) -> list[list[float] | None]:
        """How much of what goes far back stays in the query's own document, 0 for heads that hardly look back.

        A head that spreads its attention over everything has much of it in the own document too, by chance.
        """
        return [
            [same / far if far >= LEAST_FAR else 0.0 for far, same in zip(fars, sames, strict=True)]
            if fars and sames
            else None
            for fars, sames in zip(self.far, self.same, strict=True)
        ]

    def ranked(self, by: str | None = None) -> list[Head]:
        """All heads that were measured, those that look furthest first."""
        rows: list[list[float] | None] = getattr(self, by or self.by)
        known = [(value, layer, head) for layer, row in enumerate(rows) if row for head, value in enumerate(row)]
        return [(layer, head) for _, layer, head in sorted(known, key=lambda each: (-each[0], each[1:]))]


@torch.no_grad()
def watch(model: Any, text: Text, look: Look, advance: Callable[[int], None] = lambda amount: None) -> Seen:
    """Run the model over the text once; `advance` is called after every layer."""
    device = next(model.parameters()).device
    watcher = _Watcher(text, look, device, advance)
    masked = look.attention == "intra_document"
    doc_lens = text.piece_lens if masked else (len(text.tokens),)
    positions = torch.cat([torch.arange(doc_len) for doc_len in doc_lens])[None].to(device)
    tokens = torch.from_numpy(text.tokens.astype(np.int64))[None].to(device)
    with watcher.attached(model):
        model.base_model(input_ids=tokens, position_ids=positions, doc_lens=doc_lens, use_cache=False)
    return watcher.finish()


class _Watcher:
    def __init__(self, text: Text, look: Look, device: torch.device, advance: Callable[[int], None]) -> None:
        masked = look.attention == "intra_document"
        sight = build_sight(text.piece_lens, text.chunk_ids, masked=masked, beyond=look.beyond, first=look.first)
        self._sight = sight.to(device)
        self._look, self._advance = look, advance
        self._seen = Seen(by=look.by)

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Within this, every layer's attention shows us what it takes."""
        return intercept_attention(model, lambda layer: partial(self._attend, layer))

    def _attend(self, number: int, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        """What stands between a layer and its kernel: the kernel's output, unchanged."""
        out = kernel(inputs)
        named = {layer for layer, _ in self._look.heads}
        if self._look.layers is None or number in self._look.layers or number in named:
            layer = Layer.of(inputs)
            found = measure(layer, self._sight)
        else:
            layer, found = None, None
        for name in ("far", "same", "first"):
            getattr(self._seen, name).append(None if found is None else getattr(found, name))
        if layer is not None and found is not None:
            self._draw(number, layer, found)
        self._advance(1)
        return out

    def _draw(self, number: int, layer: Layer, found: Far) -> None:
        maps = self._seen.maps
        wanted = self._look.heads or tuple(self._seen.ranked()[: self._look.count])
        for place in wanted:
            if place[0] == number:
                one = layer.head(place[1])
                maps[place] = draw(one, self._sight, found.log_sums[place[1]], self._look.cell).numpy()
        for place in [place for place in maps if place not in wanted]:
            del maps[place]

    def finish(self) -> Seen:
        order: Sequence[Head] = self._look.heads or self._seen.ranked()[: self._look.count]
        self._seen.maps = {head: self._seen.maps[head] for head in order}
        return self._seen


def _of(rows: list[list[float] | None], head: Head) -> float | None:
    row = rows[head[0]]
    return None if row is None else row[head[1]]


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A model that is to be looked at."""

    name: str  # for people
    ref: str  # what to load
    values: dict[str, Any]  # its config

    @property
    def num_layers(self) -> int:
        return int(self.values["num_hidden_layers"])

    @property
    def num_heads(self) -> int:
        return int(self.values["num_attention_heads"])

    @property
    def context(self) -> int | None:
        found = self.values.get("max_position_embeddings")
        return None if found is None else int(found)


@dataclass(frozen=True, kw_only=True)
class Attention:
    text: Text
    look: Look
    block: int
    models: list[ModelRef]
    seen: list[Seen]  # one of each model
    named: bool  # whether the heads that are drawn were asked for

    @property
    def heads(self) -> list[Head]:
        """Those that are drawn, in order."""
        return list(self.seen[-1].maps)

    @property
    def has_pieces(self) -> bool:
        """Whether looking far back can stay within a document or leave it."""
        return self.look.attention == "full" and max(self.text.chunk_ids) > 0

    def difference(self, head: Head) -> np.ndarray:
        """What the second model's map has more."""
        first, second = (seen.maps[head] for seen in self.seen)
        more: np.ndarray = second - first
        return more


def cell_of(length: int, block: int, pixels: int) -> int:
    """Tokens to a side of one point: whole blocks, as few as bring a map to at most `pixels` points."""
    blocks = -(-length // block)
    return block * -(-blocks // pixels)


def check_models(models: Sequence[ModelRef], text: Text, look: Look, block: int) -> None:
    """Refuse what cannot be measured or compared."""
    first, last = models[0], models[-1]
    length = len(text.tokens)
    if length < 2 * block:
        raise ConfigError(
            f"the text has {length} tokens, too few for a map of blocks of {block}; give at least {2 * block}."
        )
    if length <= look.beyond + look.first + 1:
        raise ConfigError(
            f"the text has {length:,} tokens, so that nothing in it is more than {look.beyond:,} tokens back; "
            "give a longer text or a smaller --beyond."
        )
    if (first.num_layers, first.num_heads) != (last.num_layers, last.num_heads):
        raise ConfigError(
            f"{first.name} has {first.num_layers} layers of {first.num_heads} heads and {last.name} "
            f"{last.num_layers} of {last.num_heads}, so that their heads cannot be compared; look at each by itself."
        )
    for model in models:
        highest = int(text.tokens.max())
        if highest >= int(model.values["vocab_size"]):
            raise ConfigError(
                f"the text holds token {highest}, which {model.name} does not know (it has "
                f"{model.values['vocab_size']:,}); rows with knots are for models trained on them."
            )
    named = [*((layer, 0) for layer in look.layers or ()), *look.heads]
    for layer, head in named:
        if not (0 <= layer < last.num_layers and 0 <= head < last.num_heads):
            raise ConfigError(
                f"layer {layer}, head {head} is not there: {last.name} has layers 0 to {last.num_layers - 1} with "
                f"heads 0 to {last.num_heads - 1}."
            )


def look_at(
    models: Sequence[ModelRef], text: Text, look: Look, block: int, *, device: torch.device, dtype: torch.dtype
) -> Attention:
    """Two models: the second says which heads are drawn, so it comes first."""
    check_models(models, text, look, block)
    seen: list[Seen] = []
    named = bool(look.heads)
    for model in reversed(models):
        if seen:
            look = replace(look, heads=tuple(seen[-1].maps))
        seen.append(_watched(model, text, look, device, dtype))
        if not seen[-1].maps:
            raise ConfigError(
                f"no head of {model.name} sees anything more than {look.beyond:,} tokens back: its windows are "
                "shorter; use a smaller --beyond."
            )
    return Attention(text=text, look=look, block=block, models=list(models), seen=seen[::-1], named=named)


def _watched(model: ModelRef, text: Text, look: Look, device: torch.device, dtype: torch.dtype) -> Seen:
    with progress_bar(f"layers of {model.name}", model.num_layers) as advance:
        loaded = load_model(model.ref, device=device, dtype=dtype)
        seen = watch(loaded, text, look, lambda amount: advance(amount))
    del loaded
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return seen
