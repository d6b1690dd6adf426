"""The inputs of attention and the reference computation, for any device and dtype, one document at a time.

Tests compare every faster implementation with this one. It is differentiable and builds no S×S tensor: masks and scores
exist for one block of queries at a time. In training, the backward pass recomputes capped scores and sinks, because
keeping the scores would take S×S memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unspool.models.memory import kept

# Queries that share one mask.
BLOCK = 512
# Most fp32 scores that exist at a time: 512 MiB.
MAX_SCORES = 1 << 27


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """The inputs of one layer's attention."""

    query: Tensor  # [B, H, Q, D]; the queries are the last positions of the keys
    key: Tensor  # [B, KV, K, D]
    value: Tensor  # [B, KV, K, D]
    scaling: float | None = None  # of the scores; 1/√D if None
    window: int | None = None  # keys that a query sees, including its own, as in `transformers`
    softcap: float | None = None  # scores s become cap · tanh(s / cap)
    sinks: Tensor | None = None  # [H]: extra scores in the softmax that add nothing to the output
    doc_lens: tuple[int, ...] | None = None  # document lengths of a packed row; None: one document per sequence

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling)

    def with_heads(self, query: Tensor, key: Tensor, value: Tensor) -> "AttentionInputs":
        return replace(self, query=query, key=key, value=value)


# Computes the output [B, Q, H, D].
Kernel = Callable[[AttentionInputs], Tensor]
# Called instead of the kernel, with the kernel as its first argument.
Exchange = Callable[[Kernel, AttentionInputs], Tensor]


def reference_attention(inputs: AttentionInputs) -> Tensor:
    """Return [B, Q, H, D]."""
    if inputs.doc_lens is None:
        return _attend_document(inputs).transpose(1, 2)
    outs = [
        _attend_document(inputs.with_heads(*(tensor[:, :, start:end] for tensor in inputs.heads)))
        for start, end in pairwise(accumulate(inputs.doc_lens, initial=0))
    ]
    return (outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)).transpose(1, 2)


def _attend_document(inputs: AttentionInputs) -> Tensor:
    """Return [B, H, Q, D]."""
    if inputs.softcap is not None or inputs.sinks is not None:
        return _attend_with_scores(inputs)
    query, key, value = inputs.query, *repeat_kv_heads(*inputs.heads)
    num_keys = key.shape[2]
    windowed = inputs.window is not None and num_keys > inputs.window
    if query.shape[2] == num_keys and not windowed:
        return _sdpa(query, key, value, is_causal=True, scale=inputs.scaling)

    masks: dict[tuple[int, int, int], Tensor] = {}

    def block(some: AttentionInputs, offset: int) -> Tensor:
        shape = (some.query.shape[2], some.key.shape[2], offset)
        if shape not in masks:
            masks[shape] = causal_mask(*shape, some.window, query.device)
        return _sdpa(*some.heads, attn_mask=masks[shape], scale=some.scaling)

    return _in_blocks(inputs.with_heads(query, key, value), BLOCK, block)


def _sdpa(*heads: Tensor, **options: Any) -> Tensor:
    out: Tensor = kept.call(F.scaled_dot_product_attention, *heads, **options)
    return out


def _attend_with_scores(inputs: AttentionInputs) -> Tensor:
    batch, num_heads, num_queries, _ = inputs.query.shape
    size = max(1, min(num_queries, MAX_SCORES // (batch * num_heads * inputs.key.shape[2])))
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs.heads)

    def block(some: AttentionInputs, offset: int) -> Tensor:
        # Tensors are separate arguments: `checkpoint` would keep tensors inside an object in memory.
        args = (*some.heads, some.sinks, offset, some.scale, some.window, some.softcap)
        if not training:
            return _attend_block(*args)
        out: Tensor = checkpoint(_attend_block, *args, use_reentrant=False, preserve_rng_state=False)
        return out

    return _in_blocks(inputs, size, block)


def _in_blocks(inputs: AttentionInputs, size: int, block: Callable[[AttentionInputs, int], Tensor]) -> Tensor:
    """Call `block` with `size` queries at a time, the keys that they see, and the first query's index among these."""
    query, key, value = inputs.heads
    num_queries, num_keys = query.shape[2], key.shape[2]
    outs = []
    for start in range(0, num_queries, size):
        some = query[:, :, start : start + size]
        position = num_keys - num_queries + start
        first = 0 if inputs.window is None else max(0, position - inputs.window + 1)
        seen = slice(first, position + some.shape[2])
        outs.append(block(inputs.with_heads(some, key[:, :, seen], value[:, :, seen]), position - first))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    offset: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    batch, num_heads, num_queries, dim = query.shape
    num_kv, num_keys = key.shape[1], key.shape[2]
    grouped = query.float().reshape(batch, num_kv, -1, dim)
    scores = capped_scores(grouped, key.float(), scale, softcap).reshape(batch, num_heads, num_queries, num_keys)
    mask = causal_mask(num_queries, num_keys, offset, window, query.device)
    sinks = None if sinks is None else sinks.float().reshape(1, -1, 1, 1)
    weights = softmax_with_sinks(scores.masked_fill(~mask, -torch.inf), sinks)
    out = weights.reshape(batch, num_kv, -1, num_keys) @ value.float()
    return out.reshape(batch, num_heads, num_queries, -1).to(query.dtype)


# Parts that other implementations share.


def capped_scores(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return scores [B, KV, G·Q, K]. Query heads that share a KV head are grouped, so that keys are not repeated."""
    scores = query @ key.transpose(-1, -2) * scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention weights; `sinks` broadcasts against the scores' last dimension reduced to 1."""
    if sinks is None:
        return scores.softmax(dim=-1)
    return (scores - torch.logaddexp(scores.logsumexp(dim=-1, keepdim=True), sinks)).exp()


def within_window(distance: Tensor, window: int | None) -> Tensor:
    """Return a mask of the keys that a query sees, given their distance before the query in tokens."""
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def causal_mask(num_queries: int, num_keys: int, offset: int, window: int | None, device: Any) -> Tensor:
    """Return bool[queries, keys], where query i is at the position of key offset + i."""
    queries = torch.arange(num_queries, device=device)[:, None] + offset
    return within_window(queries - torch.arange(num_keys, device=device), window)


def repeat_kv_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for kernels that need as many KV heads as query heads."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
