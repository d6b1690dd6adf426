"""Measure attention of one or two models on the same text, with maps of the same heads.

All checks run before weights are loaded, and only one model is in memory at a time. The drawn heads are named by the
user; by default, those of the last model with the most long-range attention.
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
from unspool.core.formatting import format_share
from unspool.core.progress import progress_bar
from unspool.inspection.attention.input_text import Text
from unspool.inspection.attention.tiles import Layer, LongRange, build_visibility, draw, measure
from unspool.models.attention.reference import AttentionInputs, Kernel
from unspool.models.checks import intercept_attention
from unspool.models.load import load_model

Head = tuple[int, int]  # layer and head, from 0
Advance = Callable[[int], None]

# Below this, the share is a ratio of two small numbers and has no meaning.
LEAST_FAR = 0.05


def head_name(head: Head) -> str:
    return f"layer {head[0]}, head {head[1]}"


def show_share(share: float | None) -> str:
    return format_share(share, two_digits_below=0.1)


def value_at(layers: Sequence[list[float] | None], head: Head) -> float | None:
    """Return the value of one head from a list by layer, then by head."""
    row = layers[head[0]]
    return None if row is None else row[head[1]]


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Settings for measuring and drawing."""

    attention: str  # "full" or "intra_document"
    beyond: int  # tokens; attention farther back is long-range
    first: int  # tokens at the start that are counted separately
    cell: int  # tokens per side of one point of a map
    layers: tuple[int, ...] | None = None  # all if None
    heads: tuple[Head, ...] = ()  # heads to draw; if empty, the `count` highest ranked
    count: int = 4
    by: str = "far"  # ranking of heads: "far", "same" or "share"


@dataclass(kw_only=True)
class HeadStats:
    """Measurements of one model; lists are by layer, then by head, None where a layer was not measured."""

    far: list[list[float] | None] = field(default_factory=list)
    same: list[list[float] | None] = field(default_factory=list)
    first: list[list[float] | None] = field(default_factory=list)
    maps: dict[Head, np.ndarray] = field(default_factory=dict)  # float32[C, C], best first unless heads were named
    by: str = "far"

    def far_of(self, head: Head) -> float | None:
        return value_at(self.far, head)

    def same_of(self, head: Head) -> float | None:
        return value_at(self.same, head)

    @property
    def share(self) -> list[list[float] | None]:
        """Return the share of long-range attention within the query's document, 0 for heads below `LEAST_FAR`.

        By chance, a head that spreads its attention evenly also has much of it in its own document.
        """
        return [
            [same / far if far >= LEAST_FAR else 0.0 for far, same in zip(fars, sames, strict=True)]
            if fars and sames
            else None
            for fars, sames in zip(self.far, self.same, strict=True)
        ]

    def ranked(self, by: str | None = None) -> list[Head]:
        """Return all measured heads, highest first."""
        rows: list[list[float] | None] = getattr(self, by or self.by)
        known = [(value, layer, head) for layer, row in enumerate(rows) if row for head, value in enumerate(row)]
        return [(layer, head) for _, layer, head in sorted(known, key=lambda each: (-each[0], each[1:]))]


@torch.no_grad()
def record_attention(
    model: Any, text: Text, settings: AttentionSettings, advance: Callable[[int], None] = lambda amount: None
) -> HeadStats:
    """Run the model over the text once and measure every head; `advance` is called after every layer."""
    device = next(model.parameters()).device
    recorder = _Recorder(text, settings, device, advance)
    masked = settings.attention == "intra_document"
    doc_lens = text.piece_lens if masked else (len(text.tokens),)
    positions = torch.cat([torch.arange(doc_len) for doc_len in doc_lens])[None].to(device)
    tokens = torch.from_numpy(text.tokens.astype(np.int64))[None].to(device)
    with recorder.attached(model):
        model.base_model(input_ids=tokens, position_ids=positions, doc_lens=doc_lens, use_cache=False)
    return recorder.finish()


class _Recorder:
    def __init__(
        self, text: Text, settings: AttentionSettings, device: torch.device, advance: Callable[[int], None]
    ) -> None:
        masked = settings.attention == "intra_document"
        visibility = build_visibility(
            text.piece_lens, text.chunk_ids, masked=masked, beyond=settings.beyond, first=settings.first
        )
        self._visibility = visibility.to(device)
        self._settings, self._advance = settings, advance
        self._stats = HeadStats(by=settings.by)

    def attached(self, model: Any) -> AbstractContextManager[None]:
        """Return a context manager in which every attention layer passes its inputs to `_attend`."""
        return intercept_attention(model, lambda layer: partial(self._attend, layer))

    def _attend(self, number: int, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        """Measure a layer's inputs and return the kernel's output unchanged."""
        out = kernel(inputs)
        named = {layer for layer, _ in self._settings.heads}
        if self._settings.layers is None or number in self._settings.layers or number in named:
            layer = Layer.of(inputs)
            found = measure(layer, self._visibility)
        else:
            layer, found = None, None
        for name in ("far", "same", "first"):
            getattr(self._stats, name).append(None if found is None else getattr(found, name))
        if layer is not None and found is not None:
            self._draw(number, layer, found)
        self._advance(1)
        return out

    def _draw(self, number: int, layer: Layer, found: LongRange) -> None:
        maps = self._stats.maps
        wanted = self._settings.heads or tuple(self._stats.ranked()[: self._settings.count])
        for place in wanted:
            if place[0] == number:
                one = layer.head(place[1])
                maps[place] = draw(one, self._visibility, found.log_sums[place[1]], self._settings.cell).numpy()
        for place in [place for place in maps if place not in wanted]:
            del maps[place]

    def finish(self) -> HeadStats:
        order: Sequence[Head] = self._settings.heads or self._stats.ranked()[: self._settings.count]
        self._stats.maps = {head: self._stats.maps[head] for head in order}
        return self._stats


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A model to measure."""

    name: str  # shown name
    ref: str  # folder, file or Hub id
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
    settings: AttentionSettings
    block: int
    models: list[ModelRef]
    stats: list[HeadStats]  # one of each model
    named: bool  # whether the user named the drawn heads

    @property
    def heads(self) -> list[Head]:
        """Return the drawn heads, in order."""
        return list(self.stats[-1].maps)

    @property
    def has_pieces(self) -> bool:
        """Return whether long-range attention can cross documents."""
        return self.settings.attention == "full" and max(self.text.chunk_ids) > 0

    def difference(self, head: Head) -> np.ndarray:
        """Return the second model's map minus the first's."""
        first, second = (stats.maps[head] for stats in self.stats)
        more: np.ndarray = second - first
        return more


def cell_of(length: int, block: int, pixels: int) -> int:
    """Return the tokens per side of one point: the fewest whole blocks that keep a map within `pixels` points."""
    blocks = -(-length // block)
    return block * -(-blocks // pixels)


def check_models(models: Sequence[ModelRef], text: Text, settings: AttentionSettings, block: int) -> None:
    """Raise ConfigError for models or texts that cannot be measured or compared."""
    first, last = models[0], models[-1]
    length = len(text.tokens)
    if length < 2 * block:
        raise ConfigError(
            f"the text has {length} tokens, too few for a map of blocks of {block}; give at least {2 * block}."
        )
    if length <= settings.beyond + settings.first + 1:
        raise ConfigError(
            f"the text has {length:,} tokens, so no token is more than {settings.beyond:,} tokens back; "
            "give a longer text or a smaller `beyond`."
        )
    if (first.num_layers, first.num_heads) != (last.num_layers, last.num_heads):
        raise ConfigError(
            f"{first.name} has {first.num_layers} layers of {first.num_heads} heads and {last.name} "
            f"{last.num_layers} of {last.num_heads}, so their heads cannot be compared; inspect each model separately."
        )
    for model in models:
        highest = int(text.tokens.max())
        if highest >= int(model.values["vocab_size"]):
            raise ConfigError(
                f"the text contains token {highest}, which is not in the vocabulary of {model.name} ("
                f"{model.values['vocab_size']:,} tokens); UTK rows are for models trained on their special tokens."
            )
    named = [*((layer, 0) for layer in settings.layers or ()), *settings.heads]
    for layer, head in named:
        if not (0 <= layer < last.num_layers and 0 <= head < last.num_heads):
            raise ConfigError(
                f"layer {layer}, head {head} does not exist: {last.name} has layers 0 to {last.num_layers - 1} with "
                f"heads 0 to {last.num_heads - 1}."
            )


def measure_attention(
    models: Sequence[ModelRef],
    text: Text,
    settings: AttentionSettings,
    block: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Attention:
    """Measure each model; of two, the second is measured first because it decides which heads are drawn."""
    check_models(models, text, settings, block)
    stats: list[HeadStats] = []
    named = bool(settings.heads)
    for model in reversed(models):
        if stats:
            settings = replace(settings, heads=tuple(stats[-1].maps))
        stats.append(_record_model(model, text, settings, device, dtype))
        if not stats[-1].maps:
            raise ConfigError(
                f"no head of {model.name} can attend more than {settings.beyond:,} tokens back: its sliding windows "
                "are shorter; use a smaller `beyond`."
            )
    return Attention(text=text, settings=settings, block=block, models=list(models), stats=stats[::-1], named=named)


def _record_model(
    model: ModelRef, text: Text, settings: AttentionSettings, device: torch.device, dtype: torch.dtype
) -> HeadStats:
    with progress_bar(f"layers of {model.name}", model.num_layers) as advance:
        loaded = load_model(model.ref, device=device, dtype=dtype)
        stats = record_attention(loaded, text, settings, lambda amount: advance(amount))
    del loaded
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return stats
