"""As much haystack as fits.

In: a builder from a size (words, lines, characters …) to a prompt, and the tokens there is room for. Out: a prompt.
Promise: never too long; within 1% of the length in `fixed` mode; always comes to an end, with a ConfigError where
not even the smallest haystack fits. `reference_size` and `reference_fit` are RULER's own search and shrinking.
Price: a prompt is counted once or twice; its size is known from one calibration per task and length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from unspool.core.errors import ConfigError
from unspool.data.tokenize.encoder import Encoder, build_encoder, choose_route
from unspool.evals.prompts import encode

# Shares of the length: how near is near enough, and where between that and the limit to aim.
NEAR = 0.0075
AIM = 0.003
# After so many steps by arithmetic the interval is halved instead; it then ends within the second number.
_BY_ARITHMETIC = 8
_MOST_STEPS = 60

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Room:
    task: str
    length: int
    budget: int  # tokens for the prompt's own text

    def too_short(self, needed: int) -> ConfigError:
        least = self.length - self.budget + needed
        return ConfigError(
            f"ruler {self.task}: length {self.length} is too short: with this tokenizer the smallest prompt and its "
            f"answer need about {least} tokens. Use a greater length or leave this task out."
        )


def fit(
    build: Callable[[int], Made], tokens: Callable[[Made], int], room: Room, *, fewest: int, start: int
) -> tuple[Made, int]:
    """The prompt and its size; `start` is a guess."""
    best: tuple[Made, int] | None = None
    low, high = fewest - 1, 0  # the greatest size known to fit; the smallest known not to, 0 for none
    size = max(start, fewest)
    for step in range(_MOST_STEPS):
        made = build(size)
        used = tokens(made)
        if used <= room.budget:
            best, low = (made, size), size
            if room.budget - used <= NEAR * room.length:
                break
        elif size == fewest:
            raise room.too_short(used)
        else:
            high = size
        change = (room.budget - AIM * room.length - used) / (used / size)
        size = size + (int(np.floor(change)) or 1) if step < _BY_ARITHMETIC else (low + (high or 2 * size)) // 2
        size = max(low + 1, fewest, min(size, high - 1) if high else size)
        if high and size >= high:
            break
    assert best is not None, "the smallest size was tried or is known to fit"
    return best


def reference_size(
    tokens: Callable[[int, int], int], room: Room, *, step: int, trial: int, most_factor: int = 3
) -> int:
    """RULER's binary search for the haystack of a length; `tokens(size, attempt)` counts a fresh random prompt."""
    per_unit = tokens(trial, 0) / trial
    low, high = step, max(int(room.length / per_unit) * most_factor, 2 * step)
    best, attempt = step, 1
    while low <= high:
        middle = (low + high) // 2
        if tokens(middle, attempt) <= room.budget:
            best, low = middle, middle + 1
        else:
            high = middle - 1
        attempt += 1
    return best


def reference_fit(
    build: Callable[[int, int], Made], tokens: Callable[[Made], int], room: Room, *, step: int, size: int
) -> Made:
    """RULER's shrinking, one sample: a step less until it fits. RULER then tries again for ever; this gives up."""
    attempt = 0
    while True:
        made = build(size, attempt)
        used = tokens(made)
        if used <= room.budget:
            return made
        if size <= step:
            raise room.too_short(used)
        size, attempt = size - step, attempt + 1


# Where gold stands in `fixed` mode: every depth equally often.


# As many as RULER has for its essays.
GRID = 40
# Shares no factor with the grid, and takes neighbours far apart.
_STRIDE = 17


def target(index: int) -> float:
    return index * _STRIDE % GRID / (GRID - 1)


def parts(count: int, rng: np.random.Generator) -> list[float]:
    """One depth in each of `count` equal parts."""
    return [float(depth) for depth in (np.arange(count) + rng.random(count)) / count]


def place(depth: float, count: int) -> int:
    """Before which of `count` lines; `count` is after the last."""
    return round(depth * count)


# How many tokens a text has, exactly and fast.


class Counter:
    def __init__(self, tokenizer: Any, sample: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._encoder = _encoder(tokenizer, sample)

    def count(self, text: str) -> int:
        if self._encoder is None:
            return len(encode(self._tokenizer, text))
        return len(self._encoder.encode_plain([text])[0])


def _encoder(tokenizer: Any, sample: Sequence[str]) -> Encoder | None:
    """None for tokenizers that know no fast route: slow ones, or without an end of text."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    try:
        return choose_route(build_encoder(tokenizer), sample)
    except ConfigError:
        return None
