"""One pass of a model over a text, watched: how far every head looks, and maps of the heads that look furthest.

In: a model with our attention, a text. Out: `Seen`.
Promise: queries and keys are those that attention itself takes, after every kind of rotation; they are looked at
layer by layer and never stored. One pass is enough to find the heads that look furthest and to draw them: a head is
drawn when no more than `count` of the layers so far look further.
Elsewhere: the numbers (attention_tiles.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.inspect.attention_text import Text
from unspool.inspect.attention_tiles import Far, Layer, build_sight, draw, measure
from unspool.model.attention_reference import Rules
from unspool.model.parts import stand_between

Head = tuple[int, int]  # layer and head, counted from 0

# Of a head that hardly looks back, the share says nothing: it is a ratio of two small numbers.
LEAST_FAR = 0.05


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is measured and drawn."""

    attention: str  # "full" or "documents"
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
    masked = look.attention == "documents"
    doc_lens = text.piece_lens if masked else (len(text.tokens),)
    positions = torch.cat([torch.arange(doc_len) for doc_len in doc_lens])[None].to(device)
    tokens = torch.from_numpy(text.tokens.astype(np.int64))[None].to(device)
    with watcher.attached(model):
        model.base_model(input_ids=tokens, position_ids=positions, doc_lens=doc_lens, use_cache=False)
    return watcher.finish()


class _Watcher:
    def __init__(self, text: Text, look: Look, device: torch.device, advance: Callable[[int], None]) -> None:
        masked = look.attention == "documents"
        sight = build_sight(text.piece_lens, text.piece_docs, masked=masked, beyond=look.beyond, first=look.first)
        self._sight = sight.to(device)
        self._look, self._advance = look, advance
        self._seen = Seen(by=look.by)

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Within this, every layer's attention shows us what it takes."""
        return stand_between(model, lambda layer: partial(self._attend, layer))

    def _attend(
        self,
        number: int,
        compute: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: Rules,
        sinks: Tensor | None,
        doc_lens: tuple[int, ...] | None,
    ) -> Tensor:
        """What stands between a layer and its kernel: the kernel's output, unchanged."""
        out = compute(query, key, value, rules, sinks, doc_lens)
        named = {layer for layer, _ in self._look.heads}
        if self._look.layers is None or number in self._look.layers or number in named:
            layer = Layer(query=query[0], key=key[0], rules=rules, sinks=sinks)
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
