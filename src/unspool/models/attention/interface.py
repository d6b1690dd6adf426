"""Exact causal attention with document masks, registered with `transformers`.

It builds no S×S mask. It refuses a layer whose attention needs more than `AttentionInputs` holds.
reference.py computes on any device and in any dtype; cuda.py calls the fast kernels; padding.py cuts off padding.
"""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from unspool.core.errors import ConfigError
from unspool.models.attention import cuda
from unspool.models.attention.padding import attend_rows, needs_rows, padding_mask
from unspool.models.attention.reference import AttentionInputs, reference_attention
from unspool.models.attention.self_extend import self_extend_attention
from unspool.models.checks import attention_of
from unspool.models.memory import kept
from unspool.models.rotary import OWN_ATTENTION, depends_on_length, rotate_heads

NAME = OWN_ATTENTION
# Attribute of `position_ids` that caches the document lengths found in them.
_PACKED = "unspool_doc_lens"
# Arguments of attention functions that change the scores in ways we do not compute.
_UNSUPPORTED = ("position_bias", "indices", "block_indices")


def register() -> None:
    """Register `attn_implementation="unspool"`: attention that keeps packed documents apart without an S×S mask.

    Example:
        >>> import unspool
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> unspool.register()
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="unspool")
    """
    cuda.initialize_kernel_order()
    AttentionInterface.register(NAME, attend)
    # Without it, `transformers` would drop every attention_mask, and padding would count as text.
    AttentionMaskInterface.register(NAME, padding_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return [B, Q, H, D]: the attention function that `transformers` calls in every layer."""
    _check_supported(module, attention_mask, kwargs)
    if kwargs.get("rope_spans") is not None and depends_on_length(module):
        raise ConfigError(
            "This model's RoPE frequencies depend on the input length, which must be each document's own length; load "
            "the model with unspool.load."
        )
    if attention_mask is not None and not attention_mask.numel():  # NO_MASK
        attention_mask = None
    if attention_mask is not None and needs_rows(module, attention_mask):
        heads = query, key, value
        return attend_rows(attend, module, heads, attention_mask, scaling=scaling, **kwargs), None
    inv_freq = getattr(module, "head_inv_freq", None)
    if getattr(module, "self_extend", None) is not None:
        return self_extend_attention(module, query, key, value, scaling, kwargs), None
    if inv_freq is not None:
        query, key = rotate_heads(query, key, inv_freq, kwargs.get("position_ids"))
    # Per-head rotation and mixed precision leave queries and keys in fp32; the kernels need one dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    doc_lens = kwargs.get("doc_lens") or _packed_lens(query, key, kwargs.get("position_ids"), attention_mask)
    inputs = AttentionInputs(
        query=query,
        key=key,
        value=value,
        scaling=scaling,
        window=_window(key.shape[2] if doc_lens is None else max(doc_lens), kwargs.get("sliding_window")),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        doc_lens=doc_lens,
    )
    # Context parallelism, batched decoding and measurements replace the kernel with their own function.
    exchange = getattr(module, "exchange", None)
    out = compute_attention(inputs) if exchange is None else exchange(compute_attention, inputs)
    return out.contiguous(), None


def compute_attention(inputs: AttentionInputs) -> Tensor:
    """Compute [B, Q, H, D] with the fastest kernel that supports the inputs."""
    doc_lens, (query, key, _) = inputs.doc_lens, inputs.heads
    if doc_lens is not None and (len(query), sum(doc_lens)) != (1, key.shape[2]):
        raise ConfigError(
            f"doc_lens cover {sum(doc_lens)} tokens, and attention gets {len(query)} × {key.shape[2]}: packed rows "
            "must arrive as one whole sequence, without padding or another trainer's context parallelism; use "
            "unspool.Collator, or unspool train for context parallelism."
        )
    if cuda.supports(*inputs.heads) and inputs.softcap is None and inputs.sinks is None:
        return cuda.cuda_attention(inputs)
    return reference_attention(inputs)


def _check_supported(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    if mask is not None and mask.numel() and mask.dim() != 2:
        raise ConfigError(
            f"attn_implementation={NAME!r} does not support {mask.dim()}D attention masks, from a batch or from the "
            "model's own code; give an attention_mask [batch, tokens], or packed rows of unspool.Collator."
        )
    if mask is not None and mask.numel() and kwargs.get("doc_lens") is not None:
        raise ConfigError("A batch with doc_lens is one packed row, which needs no padding; leave attention_mask out.")
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ConfigError("This model attends to later tokens, so it does not predict text; use a causal model.")
    found = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if found:
        raise ConfigError(f"This model's attention uses {found[0]}, which is not supported yet; use another model.")


def _packed_lens(
    query: Tensor, key: Tensor, position_ids: Tensor | None, mask: Tensor | None
) -> tuple[int, ...] | None:
    """Return the document lengths of a row, found by restarting positions; None if it holds one document."""
    if position_ids is None or query.shape[2] != key.shape[2] or query.shape[2] < 2 or torch.compiler.is_compiling():
        return None
    version = None if position_ids.is_inference() else position_ids._version
    known, known_mask, found = getattr(position_ids, _PACKED, (-1, None, None))
    if known != version or known_mask is not mask:  # once, in the first layer, because it waits for the device
        starts = torch.diff(position_ids) <= 0
        if mask is not None:  # positions of padding are arbitrary
            starts = starts & mask[:, 1:]
        is_packed = bool(starts.any())
        if is_packed and len(starts) > 1:
            raise ConfigError(
                f"attn_implementation={NAME!r} needs packed rows as one sequence, and this batch has "
                f"{len(starts)} rows with positions that restart; use unspool.Collator."
            )
        ends = [0, *(starts[0].nonzero()[:, 0] + 1).tolist(), position_ids.shape[1]] if is_packed else []
        found = tuple(end - start for start, end in pairwise(ends)) or None
        setattr(position_ids, _PACKED, (version, mask, found))
    lens: tuple[int, ...] | None = found
    return lens


def _window(longest: int, sliding_window: int | None) -> int | None:
    """The layer's sliding window; None if no document is longer than that."""
    return None if sliding_window is None or longest <= sliding_window else int(sliding_window)


# Memory settings: call the registered function for some heads at a time, or keep the results of its kernels.


HEAD_CHUNKS_NAME = "unspool-head-chunks"
# Kernels that count elements in 32 bits fail beyond this.
MAX_ELEMENTS = 1 << 31


def apply_head_chunks(layers: list[nn.Module], *, heads_at_once: int | None) -> None:
    """Wrap the attention function of every layer in `attend_in_head_chunks`."""
    AttentionInterface.register(HEAD_CHUNKS_NAME, attend_in_head_chunks)
    for layer in layers:
        module = attention_of(layer)
        inner = module.config._attn_implementation
        if inner not in ALL_ATTENTION_FUNCTIONS:
            raise ConfigError(
                f"attention {inner!r} is not a registered function, so Unspool can neither keep its results nor call "
                "it for some heads at a time; load the model with unspool.load."
            )
        assert inner != HEAD_CHUNKS_NAME, "memory settings can be applied only once"
        # A copy, because the model's own config is saved with it and must not change.
        module.config = copy.copy(module.config)
        module.config._attn_implementation = HEAD_CHUNKS_NAME
        module.inner_attention = inner
        module.heads_at_once = heads_at_once


def attend_in_head_chunks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call the layer's own attention function, for some heads at a time: attention of layers with memory settings."""
    attend = ALL_ATTENTION_FUNCTIONS[module.inner_attention]
    at_once = min(module.heads_at_once or key.shape[1], key.shape[1])
    if at_once == key.shape[1]:
        return _call_inner(attend, module, query, key, value, attention_mask, **kwargs), None
    groups = query.shape[1] // key.shape[1]
    sinks = kwargs.pop("s_aux", None)
    outs = []
    # Split, not sliced: split joins the gradients of all chunks into one tensor; each slice would make a full one.
    chunks = [
        torch.split(tensor, size, dim=1)
        for tensor, size in ((query, at_once * groups), (key, at_once), (value, at_once))
    ]
    for number, heads in enumerate(zip(*chunks, strict=True)):
        first = number * at_once
        query_heads = slice(first * groups, (first + at_once) * groups)
        if sinks is not None:
            kwargs["s_aux"] = sinks[query_heads]
        mask = attention_mask
        if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
            mask = mask[:, query_heads]
        view = _HeadsView(module, slice(first, first + at_once))
        outs.append(_call_inner(attend, view, *map(_compact, heads), mask, **kwargs))
    return torch.cat(outs, dim=2), None


def _call_inner(attend: Any, module: Any, *args: Any, **kwargs: Any) -> Tensor:
    inner = module.inner_attention
    if inner == NAME:  # calls its kernels through `kept.call` itself
        out: Tensor = attend(module, *args, **kwargs)[0]
    else:
        out = kept.call_foreign(inner, attend, module, *args, **kwargs)[0]
    return out


class _HeadsView:
    """A view of an attention module for some KV heads: slices its `head_…` tensors, which have one row per KV head."""

    def __init__(self, module: Any, heads: slice) -> None:
        self._module = module
        self._slice = heads

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found[self._slice] if name.startswith("head_") and isinstance(found, Tensor) else found


def _compact(heads: Tensor) -> Tensor:
    """Copy a slice of heads [B, H, S, D] if it spans 2³¹ or more elements of its tensor.

    The copy is laid out by token, as in models, so the kernel's output needs no other copy.
    """
    span = sum((size - 1) * stride for size, stride in zip(heads.shape, heads.stride(), strict=True))
    return heads.transpose(1, 2).contiguous().transpose(1, 2) if span >= MAX_ELEMENTS else heads
