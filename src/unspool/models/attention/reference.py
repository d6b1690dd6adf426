"""Reference attention: any device, any dtype, any rule, one document after another.

It takes the arguments of attention.py and returns [B, H, S, D]. Every faster path is compared with it. It is
differentiable and builds no S×S tensor: a mask or explicit scores exist for one block of queries at a time. Training
computes capped scores and sinks twice, since keeping them would take S×S again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unspool.models.memory import kept

# Queries that share one mask.
BLOCK = 512
# Scores in fp32 that may exist at a time: 512 MiB.
MAX_SCORES = 1 << 27


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a layer asks for besides causality."""

    scaling: float | None = None  # of the scores; 1/√D if None
    window: int | None = None  # keys a query sees, itself included, as `transformers` counts
    softcap: float | None = None  # scores s become cap · tanh(s / cap)


def reference(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, sinks: Tensor | None, doc_lens: tuple[int, ...] | None
) -> Tensor:
    """Without `doc_lens` every row is one document, whose last positions are the queries."""
    if doc_lens is None:
        return _document(query, key, value, rules, sinks)
    borders = list(accumulate(doc_lens, initial=0))
    parts = [
        _document(query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], rules, sinks)
        for start, end in pairwise(borders)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _document(query: Tensor, key: Tensor, value: Tensor, rules: Rules, sinks: Tensor | None) -> Tensor:
    if rules.softcap is not None or sinks is not None:
        return _scored(query, key, value, rules, sinks)
    key, value = same_heads(query, key, value)
    num_queries, num_keys = query.shape[2], key.shape[2]
    windowed = rules.window is not None and num_keys > rules.window
    if num_queries == num_keys and not windowed:
        return _sdpa(query, key, value, is_causal=True, scale=rules.scaling)

    masks: dict[tuple[int, int, int], Tensor] = {}

    def block(query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        shape = (query.shape[2], key.shape[2], offset)
        if shape not in masks:
            masks[shape] = visible(*shape, rules.window, query.device)
        return _sdpa(query, key, value, attn_mask=masks[shape], scale=rules.scaling)

    return _in_blocks(query, key, value, rules.window, BLOCK, block)


def _sdpa(*heads: Tensor, **options: Any) -> Tensor:
    out: Tensor = kept.call(F.scaled_dot_product_attention, *heads, **options)
    return out


def _scored(query: Tensor, key: Tensor, value: Tensor, rules: Rules, sinks: Tensor | None) -> Tensor:
    batch, num_heads, num_queries, _ = query.shape
    size = max(1, min(num_queries, MAX_SCORES // (batch * num_heads * key.shape[2])))
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))

    def block(query: Tensor, key: Tensor, value: Tensor, offset: int) -> Tensor:
        if not training:
            return _scored_block(query, key, value, offset, rules, sinks)
        args = (query, key, value, offset, rules, sinks)
        out: Tensor = checkpoint(_scored_block, *args, use_reentrant=False, preserve_rng_state=False)
        return out

    return _in_blocks(query, key, value, rules.window, size, block)


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    size: int,
    block: Callable[[Tensor, Tensor, Tensor, int], Tensor],
) -> Tensor:
    """`block` on so many queries at a time, with the keys they see and the first query's place among those."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, num_queries, size):
        part = query[:, :, start : start + size]
        place = num_keys - num_queries + start
        first = 0 if window is None else max(0, place - window + 1)
        seen = slice(first, place + part.shape[2])
        parts.append(block(part, key[:, :, seen], value[:, :, seen], place - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def visible(num_queries: int, num_keys: int, offset: int, window: int | None, device: Any) -> Tensor:
    """bool[queries, keys], where query i stands at the key offset + i."""
    behind = torch.arange(num_queries, device=device)[:, None] + offset - torch.arange(num_keys, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _scored_block(query: Tensor, key: Tensor, value: Tensor, offset: int, rules: Rules, sinks: Tensor | None) -> Tensor:
    batch, num_heads, num_queries, dim = query.shape
    num_kv, num_keys = key.shape[1], key.shape[2]
    # Query heads stand beside the KV head they share, so that keys and values are not repeated.
    grouped = query.float().reshape(batch, num_kv, -1, dim)
    scores = grouped @ key.float().transpose(-1, -2) * (dim**-0.5 if rules.scaling is None else rules.scaling)
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.reshape(batch, num_heads, num_queries, num_keys)
    scores = scores.masked_fill(~visible(num_queries, num_keys, offset, rules.window, query.device), -torch.inf)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        # A sink takes part in the softmax and has nothing to say.
        sink = sinks.float().reshape(1, -1, 1, 1)
        weights = (scores - torch.logaddexp(scores.logsumexp(dim=-1, keepdim=True), sink)).exp()
    out = weights.reshape(batch, num_kv, -1, num_keys) @ value.float()
    return out.reshape(batch, num_heads, num_queries, -1).to(query.dtype)


def same_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat grouped keys and values for kernels that want as many of them as queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
