"""Attention of some queries to some keys of a longer row, with what is needed to put such blocks together.

A block takes queries [B, H, Q, D] and keys and values [B, KV, K, D], and returns the output over these keys alone and
its log-sum-exp. The backward pass takes output and log-sum-exp of the *whole* row, which makes each block's share of
the gradient exact. On CUDA in 16 bits it calls torch's FlashAttention, else plain products over some queries at a time.
ring.py decides which blocks there are.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from unspool.model import keep
from unspool.model.attention_reference import MAX_SCORES, same_heads, visible

Grads = tuple[Tensor, Tensor, Tensor]


def block(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp), both fp32. Causal: query i sees keys 0 to i."""
    key, value = same_heads(query, key, value)
    if _has_flash(query):
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        found = keep.call(flash, query, key, value, 0.0, causal, scale=scale)
        return found[0].float(), found[1]
    outs, sums = [], []
    for _, scores in _scores(query, key, scale, causal=causal):
        log_sum = scores.logsumexp(dim=-1)
        outs.append((scores - log_sum[..., None]).exp() @ value.float())
        sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def block_backward(
    grad: Tensor, heads: tuple[Tensor, Tensor, Tensor], out: Tensor, log_sum: Tensor, scale: float, *, causal: bool
) -> Grads:
    """Gradients of query, key and value by this block, fp32."""
    query, num_kv = heads[0], heads[1].shape[1]
    key, value = same_heads(*heads)
    if _has_flash(query):
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
        empty, seed = None, torch.zeros(2, dtype=torch.uint64, device=query.device)
        sizes = (query.shape[2], key.shape[2])
        args = (
            grad,
            query,
            key,
            value,
            out.to(query.dtype),
            log_sum,
            empty,
            empty,
            *sizes,
            0.0,
            causal,
            seed,
            seed[:0],
        )
        query_grad, key_grad, value_grad = (part.float() for part in flash(*args, scale=scale))
    else:
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        key_grad, value_grad = (torch.zeros_like(part, dtype=torch.float32) for part in (key, value))
        delta = (grad.float() * out.float()).sum(dim=-1, keepdim=True)
        for rows, scores in _scores(query, key, scale, causal=causal):
            weights = (scores - log_sum[:, :, rows, None]).exp()
            some = grad[:, :, rows].float()
            value_grad += weights.transpose(-1, -2) @ some
            weights *= (some @ value.float().transpose(-1, -2) - delta[:, :, rows]) * scale
            query_grad[:, :, rows] = weights @ key.float()
            key_grad += weights.transpose(-1, -2) @ query[:, :, rows].float()
    return query_grad, _shared(key_grad, num_kv), _shared(value_grad, num_kv)


def _scores(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Iterator[tuple[slice, Tensor]]:
    """Some queries at a time: which they are, and their scores in fp32, −∞ where they do not look."""
    batch, num_heads, num_queries, _ = query.shape
    size = max(1, MAX_SCORES // (batch * num_heads * key.shape[2]))
    for start in range(0, num_queries, size):
        rows = slice(start, min(start + size, num_queries))
        scores = query[:, :, rows].float() @ key.float().transpose(-1, -2) * scale
        if causal:
            unseen = ~visible(scores.shape[2], key.shape[2], start, None, query.device)
            scores = scores.masked_fill(unseen, -torch.inf)
        yield rows, scores


def _shared(grad: Tensor, num_kv: int) -> Tensor:
    """Gradients of repeated KV heads, added up."""
    return grad if grad.shape[1] == num_kv else grad.view(len(grad), num_kv, -1, *grad.shape[2:]).sum(dim=2)


def _has_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0
