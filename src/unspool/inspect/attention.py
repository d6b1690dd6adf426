"""Attention of one model or two on the same text: measured, with maps of the same heads.

In: names of models, a text, what to look at. Out: `Attention`.
Promise: everything that can be refused is refused before weights are loaded; models are in memory one at a time.
The heads that are drawn are those of the last model that look furthest, or those that are named.
Elsewhere: the pass over a text (attention_watch.py), pages and figures (attention_page.py, attention_figure.py),
tables (attention_table.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unspool.base.errors import ConfigError
from unspool.base.progress import progress_bar
from unspool.inspect.attention_text import Text
from unspool.inspect.attention_watch import Head, Look, Seen, watch
from unspool.model.load import load_model


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
        return self.look.attention == "full" and max(self.text.piece_docs) > 0

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
