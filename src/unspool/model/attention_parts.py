"""The registered attention function, called for some heads at a time or with its results kept for the backward pass.

This function wraps the one that `transformers` would call and returns the same numbers. With some heads at a time, a
kernel needs workspace for those heads only. Query heads stay with the KV head that they share, and with its frequencies
if heads have their own. Kept are the outputs of attention kernels and their log-sum-exp, about one hidden state per
token and layer. attention.py computes attention; keep.py keeps results.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from unspool.base.errors import ConfigError
from unspool.model import attention, keep
from unspool.model.parts import attention_of

NAME = "unspool-in-parts"
# Kernels that count elements in 32 bits would go astray beyond.
MOST_ELEMENTS = 1 << 31


def apply_attention_parts(layers: list[nn.Module], *, heads_at_once: int | None) -> None:
    """Put this module's function between the attention modules and the function they call now."""
    AttentionInterface.register(NAME, attend_in_parts)
    for layer in layers:
        module = attention_of(layer)
        inner = module.config._attn_implementation
        if inner not in ALL_ATTENTION_FUNCTIONS:
            raise ConfigError(
                f"attention {inner!r} is not a registered function, so that it can neither be kept nor computed some "
                "heads at a time; load the model with Unspool's attention."
            )
        assert inner != NAME, "memory settings are applied once"
        # A copy, so that the model's own config, which is saved with it, does not hear of this.
        module.config = copy.copy(module.config)
        module.config._attn_implementation = NAME
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
    if inner == attention.NAME:  # its kernels go through `keep.call` themselves
        out: Tensor = attend(module, *args, **kwargs)[0]
    else:
        out = keep.call_foreign(inner, attend, module, *args, **kwargs)[0]
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
