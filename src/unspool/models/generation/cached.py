"""Token-by-token generation that keeps the KV cache of the last prompt and prefills only what the next one adds.

Questions at the end of one long text share the text, so only the first question waits for its prefill.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, TemperatureLogitsWarper, TopPLogitsWarper

from unspool.core.errors import ConfigError
from unspool.models.checks import check_tokens
from unspool.models.generation.greedy import PreallocatedLayer, next_logits, prefill_chunk_len
from unspool.models.rotary import decides_by_document, same_frequencies

# Spare tokens: a later prompt may be this much longer without a new allocation.
SPARE_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The same seed gives the same answer, regardless of earlier prompts."""

    temperature: float = 0.0  # 0: always the most likely token
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature {self.temperature}: it must be 0 (greedy) or above, such as 0.7.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p}: it must be above 0 and at most 1.")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed {self.seed}: it must be between 0 and 2^63 − 1.")


class CachedGenerator:
    """Generator for one model, with the KV cache of one prompt."""

    def __init__(self, model: Any, *, stop_ids: Collection[int], prefill_chunk: int | None = None) -> None:
        self._model, self._stop_ids, self._prefill_chunk = model, stop_ids, prefill_chunk
        self._cache: Cache | None = None
        self._capacity = 0
        self._read = np.zeros(0, dtype=np.int64)  # tokens in the cache of every layer
        self._prompt_len = 0  # length of the prompt that they belong to

    def reusable(self, ids: np.ndarray) -> int:
        """Count the tokens at the start of a prompt that are in the cache already."""
        # The last token is always computed, because its logits give the answer.
        longest = min(len(self._read), len(ids) - 1)
        if decides_by_document(self._model):
            if not same_frequencies(self._model, [self._prompt_len, len(ids)]):
                return 0
            # An answer may exceed the length at which the frequencies change, although its prompt does not.
            longest = min(longest, self._prompt_len)
        differs = np.flatnonzero(self._read[:longest] != ids[:longest])
        return int(differs[0]) if len(differs) else longest

    def generate(
        self,
        ids: np.ndarray,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        on_read: Callable[[int], object] = lambda count: None,
    ) -> Iterator[int]:
        """Yield the tokens after a prompt, up to a stop token (not included) or `max_new_tokens`.

        `on_read` is called with the number of prompt tokens just prefilled.
        """
        check_tokens(self._model, [ids])
        ids = ids.astype(np.int64)
        self._reserve(ids, len(ids) + max_new_tokens)
        choose = _chooser(sampling)
        chunk = self._prefill_chunk or prefill_chunk_len(self._model, self._capacity)
        for start in range(len(self._read), len(ids), chunk):
            logits = self._append(ids[start : start + chunk])
            on_read(len(ids[start : start + chunk]))
        for count in range(1, max_new_tokens + 1):
            token = choose(logits)
            if token in self._stop_ids:
                return
            yield token
            if count < max_new_tokens:
                logits = self._append(np.array([token]))

    def _reserve(self, ids: np.ndarray, capacity: int) -> None:
        """Crop the cache to what the prompt shares with it, or start a new one."""
        shared = self.reusable(ids)
        # A growing cache takes twice its memory for a while, which is worth it only for a long common prefix.
        if self._cache is None or (capacity > self._capacity and 2 * shared < len(ids)):
            shared, self._capacity = 0, capacity + SPARE_TOKENS
            self._cache = None  # free it before the new one is allocated
            # Layers with a sliding window keep all keys too, so that the cache can be cropped.
            self._cache = Cache(layer_class_to_replicate=partial(PreallocatedLayer, self._capacity))
        self._read, self._prompt_len = ids[:shared], len(ids)
        # After an interrupted pass some layers hold more tokens than others; cropping makes them equal.
        for layer in self._cache.layers:
            layer.keep(shared)

    @torch.inference_mode()
    def _append(self, ids: np.ndarray) -> Tensor:
        """Add tokens to the cache; return the logits [V] after the last one."""
        positions = np.arange(len(self._read), len(self._read) + len(ids))
        length = self._prompt_len if decides_by_document(self._model) else None
        logits = next_logits(self._model, self._cache, ids, positions, np.array([len(ids) - 1]), length)[0]
        self._read = np.concatenate([self._read, ids])
        return logits


def _chooser(sampling: Sampling) -> Callable[[Tensor], int]:
    """Return a function that chooses the next token from logits [V]."""
    if not sampling.temperature:
        return lambda logits: int(logits.argmax())
    # On the CPU, so that all devices draw the same numbers.
    rng = torch.Generator().manual_seed(sampling.seed)
    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []

    def choose(logits: Tensor) -> int:
        scores = logits[None].float().cpu()
        for warp in warpers:
            scores = warp(None, scores)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=rng))

    return choose
