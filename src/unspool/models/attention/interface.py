"""Exact causal attention, each document seeing only itself, registered once with `transformers`.

It takes queries [B, H, S, D], keys and values [B, KV, S, D], `doc_lens` (host integers that sum to S) if the batch is
packed, and the options of a layer: a sliding window, capped scores, sinks. It returns [B, S, H, D], as
`AttentionInterface` asks. It builds no S×S mask, a change in one document changes no other, and it refuses a layer that
asks for anything else. attention_reference.py computes on any device and in any dtype; attention_cuda.py calls the
fast kernels.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from unspool.core.errors import ConfigError
from unspool.models.attention import cuda
from unspool.models.attention.reference import Rules, reference
from unspool.models.checks import attention_of
from unspool.models.memory import kept
from unspool.models.rotary import rotate_heads

NAME = "unspool"
# Arguments by which layers ask for scores that none of our paths computes.
_UNKNOWN = ("position_bias", "indices", "block_indices")


def register() -> None:
    """Make `attn_implementation="unspool"` known. It has no mask function, so no mask is ever built."""
    cuda.settle_kernel_order()
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
    _refuse_what_is_not_exact(module, attention_mask, kwargs)
    inv_freq = getattr(module, "head_inv_freq", None)
    if inv_freq is not None:
        query, key = rotate_heads(query, key, inv_freq, kwargs.get("position_ids"))
    # Per-head rotation and mixed precision leave queries and keys in fp32; the kernels want one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    doc_lens = kwargs.get("doc_lens")
    rules = Rules(scaling=scaling, window=_window(key, doc_lens, kwargs), softcap=kwargs.get("softcap"))
    sinks = kwargs.get("s_aux")
    # Where a row lies on several devices, something stands between it and the kernel that brings it together.
    exchange = getattr(module, "exchange", None)
    if exchange is None:
        out = compute(query, key, value, rules, sinks, doc_lens)
    else:
        out = exchange(compute, query, key, value, rules, sinks, doc_lens)
    return out.contiguous(), None


def compute(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, sinks: Tensor | None, doc_lens: tuple[int, ...] | None
) -> Tensor:
    """[B, S, H, D], by the fastest kernel that takes these."""
    assert doc_lens is None or (len(query), sum(doc_lens)) == (1, key.shape[2]), "doc_lens must cover one packed row"
    if cuda.fits(query, key, value) and rules.softcap is None and sinks is None:
        return cuda.attend(query, key, value, rules, doc_lens)
    return reference(query, key, value, rules, sinks, doc_lens).transpose(1, 2)


def _refuse_what_is_not_exact(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if mask is not None:
        raise ConfigError("This model makes attention masks of its own, which is not supported yet; use another one.")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ConfigError("This model looks at later tokens too, so it does not predict text; use a causal one.")
    asked = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if asked:
        raise ConfigError(f"This model's attention uses {asked[0]}, which is not supported yet; use another one.")


def _window(key: Tensor, doc_lens: tuple[int, ...] | None, kwargs: dict[str, Any]) -> int | None:
    """The layer's sliding window, or None where no document is longer than that."""
    window = kwargs.get("sliding_window")
    longest = key.shape[2] if doc_lens is None else max(doc_lens)
    return None if window is None or longest <= window else int(window)


# The registered attention function, called for some heads at a time or with its results kept for the backward pass.


HEAD_CHUNKS_NAME = "unspool-in-parts"
# Kernels that count elements in 32 bits would go astray beyond.
MOST_ELEMENTS = 1 << 31


def apply_attention_parts(layers: list[nn.Module], *, heads_at_once: int | None) -> None:
    """Put this module's function between the attention modules and the function they call now."""
    AttentionInterface.register(HEAD_CHUNKS_NAME, attend_in_parts)
    for layer in layers:
        module = attention_of(layer)
        inner = module.config._attn_implementation
        if inner not in ALL_ATTENTION_FUNCTIONS:
            raise ConfigError(
                f"attention {inner!r} is not a registered function, so that it can neither be kept nor computed some "
                "heads at a time; load the model with Unspool's attention."
            )
        assert inner != HEAD_CHUNKS_NAME, "memory settings are applied once"
        # A copy, so that the model's own config, which is saved with it, does not hear of this.
        module.config = copy.copy(module.config)
        module.config._attn_implementation = HEAD_CHUNKS_NAME
        module.inner_attention = inner
        module.heads_at_once = heads_at_once


def attend_in_parts(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function `transformers` calls in every layer that has such settings."""
    attend = ALL_ATTENTION_FUNCTIONS[module.inner_attention]
    at_once = min(module.heads_at_once or key.shape[1], key.shape[1])
    if at_once == key.shape[1]:
        return _attend(attend, module, query, key, value, attention_mask, **kwargs), None
    groups = query.shape[1] // key.shape[1]
    sinks = kwargs.pop("s_aux", None)
    outs = []
    # Split and not sliced: the gradients of all parts come together in one tensor instead of one each.
    parts = [
        torch.split(tensor, size, dim=1)
        for tensor, size in ((query, at_once * groups), (key, at_once), (value, at_once))
    ]
    for number, some in enumerate(zip(*parts, strict=True)):
        first = number * at_once
        heads = _Heads(module, slice(first, first + at_once))
        if sinks is not None:
            kwargs["s_aux"] = sinks[first * groups : (first + at_once) * groups]
        mask = attention_mask
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, first * groups : (first + at_once) * groups]
        outs.append(_attend(attend, heads, *[_within_reach(tensor) for tensor in some], mask, **kwargs))
    return torch.cat(outs, dim=2), None


def _attend(attend: Any, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    inner = module.inner_attention
    if inner == NAME:  # its kernels go through `keep.call` themselves
        out: Tensor = attend(module, *args, **kwargs)[0]
    else:
        out = kept.call_foreign(inner, attend, module, *args, **kwargs)[0]
    return out


class _Heads:
    """An attention module as seen by some of its KV heads: what it holds per head, named head_…, is cut to them."""

    def __init__(self, module: Any, heads: slice) -> None:
        self._module = module
        self._slice = heads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found[self._slice] if name.startswith("head_") and isinstance(found, Tensor) else found


def _within_reach(part: Tensor) -> Tensor:
    """[B, H, S, D] of some heads, which lie as far apart as all of them; beyond 2³¹ elements they are moved together.

    By token, as models lay them out, so that the kernel's output comes in the order in which it is wanted.
    """
    reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return part.transpose(1, 2).contiguous().transpose(1, 2) if reach >= MOST_ELEMENTS else part
