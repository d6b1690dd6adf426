"""Exact causal attention, each document seeing only itself, registered once with `transformers`.

It takes queries [B, H, S, D], keys and values [B, KV, S, D], `doc_lens` (host integers that sum to S) if the batch is
packed, and the options of a layer: a sliding window, capped scores, sinks. It returns [B, S, H, D], as
`AttentionInterface` asks. It builds no S×S mask, a change in one document changes no other, and it refuses a layer that
asks for anything else. attention_reference.py computes on any device and in any dtype; attention_cuda.py calls the
fast kernels.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from unspool.base.errors import ConfigError
from unspool.model import attention_cuda
from unspool.model.attention_reference import Rules, reference
from unspool.model.rotary import rotate_heads

NAME = "unspool"
# Arguments by which layers ask for scores that none of our paths computes.
_UNKNOWN = ("position_bias", "indices", "block_indices")


def register() -> None:
    """Make `attn_implementation="unspool"` known. It has no mask function, so no mask is ever built."""
    attention_cuda.settle_kernel_order()
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
    if attention_cuda.fits(query, key, value) and rules.softcap is None and sinks is None:
        return attention_cuda.attend(query, key, value, rules, doc_lens)
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
