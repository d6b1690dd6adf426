"""Exact causal attention, each document seeing only itself, registered once with `transformers`.

In: queries [B, H, S, D], keys and values [B, KV, S, D]; `doc_lens` (host integers that sum to S)
when the batch is packed. Out: [B, S, H, D], as `AttentionInterface` asks.
Promise: no S×S mask is built for training; perturbing one document changes no other.
On CPU a loop of SDPA calls, one per document, which is also the reference for every other path;
on CUDA one batched SDPA call (cuDNN first) where all documents are equally long, else `varlen_attn`.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from unspool.base.errors import ConfigError
from unspool.model.rotary import rotate_heads

NAME = "unspool"
# cuDNN is 1.7 times FlashAttention-2 on Hopper and is not always torch's first choice.
CUDA_KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def register() -> None:
    """Make `attn_implementation="unspool"` known. It has no mask function, so no mask is ever built."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function `transformers` calls in every layer."""
    _refuse_what_is_not_exact(key, attention_mask, kwargs)
    inv_freq = getattr(module, "head_inv_freq", None)
    if inv_freq is not None:
        query, key = rotate_heads(query, key, inv_freq, kwargs.get("position_ids"))
    # Per-head rotation and mixed precision leave queries and keys in fp32; the kernels want one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    doc_lens = kwargs.get("doc_lens")
    assert doc_lens is None or (len(query), sum(doc_lens)) == (1, key.shape[2]), "doc_lens must cover one packed row"
    if doc_lens is None:
        out = _causal(query, key, value, scaling)
    elif query.is_cuda:
        out = _documents_cuda(query, key, value, scaling, doc_lens)
    else:
        out = _documents_loop(query, key, value, scaling, doc_lens)
    return out.transpose(1, 2).contiguous(), None


def _refuse_what_is_not_exact(key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if mask is not None:
        raise ConfigError("This model makes attention masks of its own, which is not supported yet; use another one.")
    window = kwargs.get("sliding_window")
    if window is not None and key.shape[2] > window:
        raise ConfigError(
            f"This model has a sliding attention window of {window} tokens, which is not supported beyond it yet; "
            "use a model with full attention in every layer."
        )
    if kwargs.get("softcap") is not None:
        raise ConfigError("This model caps its attention scores, which is not supported yet; use another model.")
    if kwargs.get("s_aux") is not None:
        raise ConfigError("This model adds sinks to its attention scores, which is not supported yet; use another.")


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Ordinary causal attention; queries are the last positions when a cache holds earlier keys."""
    key, value = _same_heads(query, key, value)
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == 1 or num_queries == num_keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=num_queries > 1, scale=scaling)
    mask: Any = causal_lower_right(num_queries, num_keys)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _documents_loop(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, doc_lens: tuple[int, ...]
) -> Tensor:
    key, value = _same_heads(query, key, value)
    borders = [0]
    for doc_len in doc_lens:
        borders.append(borders[-1] + doc_len)
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], is_causal=True, scale=scaling
        )
        for start, end in pairwise(borders)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _documents_cuda(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, doc_lens: tuple[int, ...]
) -> Tensor:
    if len(set(doc_lens)) == 1:
        return _equal_documents(query, key, value, scaling, len(doc_lens))
    key, value = _same_heads(query, key, value)
    lens = torch.tensor((0, *doc_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    borders = lens.to(query.device, non_blocking=True)
    # A power of two, so that slightly different batches share one compiled kernel.
    longest = 1 << (max(doc_lens) - 1).bit_length()
    flat = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    kernel: Any = varlen_attn  # its signature differs between torch 2.11 and 2.13 in what comes after the lengths
    out: Tensor = kernel(*flat, borders, borders, longest, longest, scale=scaling, window_size=(-1, 0))
    return out.transpose(0, 1)[None]


def _equal_documents(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, num_docs: int) -> Tensor:
    def split(tensor: Tensor) -> Tensor:  # [1, H, n·L, D] → [n, H, L, D]
        heads, _, dim = tensor.shape[1:]
        return tensor[0].reshape(heads, num_docs, -1, dim).transpose(0, 1)

    with sdpa_kernel(CUDA_KERNELS, set_priority=True):
        out = F.scaled_dot_product_attention(
            split(query), split(key), split(value), is_causal=True, scale=scaling, enable_gqa=True
        )
    return out.transpose(0, 1).flatten(1, 2)[None]


def _same_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat grouped keys and values for kernels that want as many of them as queries."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
