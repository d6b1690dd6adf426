"""Greedy generation for several questions, on one context that is prefilled once, or each on its own prompt.

The tokens equal those of each question alone, up to rounding. Logits are computed only for last positions. The cache
holds the whole context. Chunk sizes depend on the model, the device and the lengths, but not on free memory, so the
same questions always get the same answers.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from unspool.models.checks import check_tokens
from unspool.models.generation.batched import answer_batch, to_tensor
from unspool.models.generation.shared_prefix import SharedPrefixAttention, can_batch, can_share_prefix
from unspool.models.rotary import decides_by_document, same_frequencies

# Most tokens of questions in one sequence; with more, discarded scores cost more than sharing saves.
MAX_SHARED_TOKENS = 4096
# Tokens per prefill chunk if the device's memory is unknown.
PREFILL_CHUNK = 8192
# Share of a GPU's memory that plans may use; the rest is for kernel workspaces and fragmentation.
USABLE = 0.8
# Most prompt tokens in one packed row of prefill; longer rows are no faster.
MAX_ROW_TOKENS = 1 << 17
# Most prompts in one batch; above this, reading keys limits a step, not launches.
MAX_PROMPTS = 64
# Share of the memory besides weights for the keys of a batch; prefill needs the rest.
BATCH_SHARE = 0.5
# Padded tokens of a batch if the device's memory is unknown: 3 GiB for SmolLM2-135M in fp32.
CPU_BATCH_TOKENS = 1 << 16


@dataclass(frozen=True)
class MemoryCosts:
    """Bytes of a model's weights, and bytes per token of its cache and prefill."""

    weights: int
    cache_per_token: int  # keys and values of all layers
    prefill_per_token: int  # activations of one layer

    @classmethod
    def of(cls, model: Any) -> "MemoryCosts":
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = next(model.parameters()).element_size()
        # The residual stream and its norms, queries and the attention output, and the three wide tensors of the MLP.
        wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        return cls(
            weights=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
            cache_per_token=2 * config.num_hidden_layers * heads * dim * size,
            prefill_per_token=size * (8 * config.hidden_size + 4 * config.num_attention_heads * dim + 4 * wide),
        )


def prefill_chunk_len(model: Any, cached: int) -> int:
    """Return the largest prefill chunk that fits with a cache of `cached` tokens; long chunks have fast kernels."""
    if model.device.type != "cuda":
        return PREFILL_CHUNK
    costs = MemoryCosts.of(model)
    left = _usable_memory(model) - costs.weights - costs.cache_per_token * cached
    return int(max(1024, left // costs.prefill_per_token))


def plan_batches(model: Any, lens: list[int], max_new_tokens: int) -> list[list[int]]:
    """Group prompts of similar lengths into batches that fit into memory, longest prompts first."""
    left = sorted(range(len(lens)), key=lambda at: (-lens[at], at))
    tokens = CPU_BATCH_TOKENS
    if model.device.type == "cuda":
        costs = MemoryCosts.of(model)
        tokens = int(BATCH_SHARE * (_usable_memory(model) - costs.weights) // costs.cache_per_token)
    found = []
    while left:
        most = min(MAX_PROMPTS, max(1, tokens // (lens[left[0]] + max_new_tokens)))
        # As equal as possible: a last batch of one prompt would take as many steps as a full batch.
        size = -(-len(left) // -(-len(left) // most))
        found.append(left[:size])
        left = left[size:]
    return found


def _usable_memory(model: Any) -> float:
    return USABLE * float(torch.cuda.get_device_properties(model.device).total_memory)


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer in memory for `capacity` tokens, so that adding a token copies no cache."""

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or end > self._buffers[0].shape[-2]:
            capacity = self._capacity if end <= self._capacity else 2 * end
            keys, values = (
                new.new_empty(*new.shape[:-2], capacity, new.shape[-1]) for new in (key_states, value_states)
            )
            if start:
                keys[..., :start, :], values[..., :start, :] = self.keys, self.values
            self._buffers = (keys, values)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        # The first pass has no earlier tokens, and kernels are faster on whole tensors.
        return (self.keys, self.values) if start else (key_states, value_states)

    def keep(self, length: int) -> None:
        """Keep only the first `length` tokens."""
        if self.is_initialized and self.keys.numel():
            self.keys, self.values = self.keys[..., :length, :], self.values[..., :length, :]


@torch.inference_mode()
def answer(
    model: Any,
    context_ids: np.ndarray,
    questions: list[np.ndarray],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    prefill_chunk: int | None = None,
) -> list[list[int]]:
    """Generate after each context + question, up to a stop token (not included) or `max_new_tokens`.

    If RoPE depends on the input length, the length of the whole prompt counts, as in plain `transformers`, not that of
    a chunk. Tokens of the answer are rotated like the prompt.
    """
    check_tokens(model, (context_ids, *questions))
    lengths = [len(context_ids) + len(ids) for ids in questions]
    by_length = decides_by_document(model)
    if by_length and not same_frequencies(model, lengths):
        whole = [np.concatenate([context_ids, ids]) for ids in questions]
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
        alone = (answer(model, ids[:0], [ids], **options, prefill_chunk=prefill_chunk) for ids in whole)
        return [found for (found,) in alone]
    length = lengths[0] if by_length else None
    if not len(context_ids) and len(questions) > 1 and can_batch(model):
        return _answer_in_batches(model, questions, max_new_tokens, stop_ids, prefill_chunk)
    longest = max(map(len, questions)) + max_new_tokens
    together = len(questions) > 1 and sum(map(len, questions)) <= MAX_SHARED_TOKENS and can_share_prefix(model)
    own = sum(map(len, questions)) + len(questions) * max_new_tokens if together else longest
    # Layers with a sliding window keep all keys too, so that the cache can be cropped.
    cache = Cache(layer_class_to_replicate=partial(PreallocatedLayer, len(context_ids) + own))
    chunk = prefill_chunk or prefill_chunk_len(model, len(context_ids) + own)
    for start in range(0, len(context_ids), chunk):
        _next_token(model, cache, context_ids[start : start + chunk], length)
    if together:
        return _answer_together(model, cache, questions, max_new_tokens, stop_ids)
    return [_answer_alone(model, cache, ids, max_new_tokens, stop_ids, chunk, length) for ids in questions]


def _answer_in_batches(
    model: Any,
    prompts: list[np.ndarray],
    max_new_tokens: int,
    stop_ids: Collection[int],
    prefill_chunk: int | None,
) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
    answers: list[list[int]] = [[] for _ in prompts]
    for some in plan_batches(model, [len(ids) for ids in prompts], max_new_tokens):
        batch = [prompts[at] for at in some]
        if len(batch) == 1:
            # A single prompt needs no padding, and its keys may take all memory.
            found = answer(model, batch[0][:0], batch, **options, prefill_chunk=prefill_chunk)
        else:
            padded = len(batch) * (max(map(len, batch)) + max_new_tokens)
            row_tokens = prefill_chunk or min(MAX_ROW_TOKENS, prefill_chunk_len(model, padded))
            found = answer_batch(model, batch, **options, row_tokens=row_tokens)
        for at, ids in zip(some, found, strict=True):
            answers[at] = ids
    return answers


def _answer_alone(
    model: Any,
    cache: Cache,
    ids: np.ndarray,
    max_new_tokens: int,
    stop_ids: Collection[int],
    chunk: int,
    length: int | None,
) -> list[int]:
    before = cache.get_seq_length()
    generated: list[int] = []
    for start in range(0, len(ids), chunk):
        token = _next_token(model, cache, ids[start : start + chunk], length)
    while token not in stop_ids:
        generated.append(token)
        if len(generated) >= max_new_tokens:
            break
        token = _next_token(model, cache, np.array([token]), length)
    # A negative count removes tokens from the end; older versions read a positive one as a length.
    cache.crop(before - cache.get_seq_length())
    return generated


def _answer_together(
    model: Any, cache: Cache, questions: list[np.ndarray], max_new_tokens: int, stop_ids: Collection[int]
) -> list[list[int]]:
    shared = cache.get_seq_length()
    lens = [len(ids) for ids in questions]
    attention = SharedPrefixAttention(shared, model.device)
    answers: list[list[int]] = [[] for _ in questions]
    active = list(range(len(lens)))
    ids, owners = np.concatenate(questions), np.repeat(active, lens)
    positions = np.concatenate([np.arange(shared, shared + size) for size in lens])
    ends = np.cumsum(lens) - 1
    with attention.attached(model):
        while active:
            attention.add_tokens(to_tensor(model, owners), to_tensor(model, positions))
            tokens = dict(zip(active, _next_tokens(model, cache, ids, positions, ends), strict=True))
            active = [at for at in active if tokens[at] not in stop_ids]
            for at in active:
                answers[at].append(tokens[at])
            active = [at for at in active if len(answers[at]) < max_new_tokens]
            ids, owners = np.array([tokens[at] for at in active]), np.array(active)
            positions = np.array([shared + lens[at] + len(answers[at]) - 1 for at in active])
            ends = np.arange(len(active))
    return answers


def _next_token(model: Any, cache: Cache, ids: np.ndarray, length: int | None) -> int:
    """Append `ids` to the cache; return the most likely token after them."""
    seen = cache.get_seq_length()
    return _next_tokens(model, cache, ids, np.arange(seen, seen + len(ids)), np.array([len(ids) - 1]), length)[0]


def _next_tokens(
    model: Any, cache: Cache, ids: np.ndarray, positions: np.ndarray, ends: np.ndarray, length: int | None = None
) -> list[int]:
    """Append `ids` at `positions` to the cache; return the most likely token after each of those at `ends`."""
    found: list[int] = next_logits(model, cache, ids, positions, ends, length).argmax(dim=-1).tolist()
    return found


def next_logits(
    model: Any, cache: Cache, ids: np.ndarray, positions: np.ndarray, ends: np.ndarray, length: int | None = None
) -> Tensor:
    """Append `ids` at `positions` to the cache; return the logits [len(ends), V] after each of those at `ends`.

    `length` is the length of the whole prompt, if RoPE depends on it.
    """
    tokens, where, last = (to_tensor(model, values) for values in (ids, positions, ends))
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": last}
    if length is not None:
        options["rope_spans"] = ((len(ids), length),)
    logits: Tensor = model(input_ids=tokens[None], position_ids=where[None], **options).logits[0]
    return logits
