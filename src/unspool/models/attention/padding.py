"""Padded batches: the mask function that `transformers` calls for our attention, and attention over the real tokens.

Padding after a row's tokens needs no mask, because attention is causal. Padding before them is cut off, one row at a
time. No S×S mask exists in either case.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function

from unspool.core.errors import ConfigError
from unspool.models.rotary import OWN_ATTENTION

# A 4D mask: `transformers` returns it as it is, instead of looking for packed documents, which waits for the device.
NO_MASK = torch.empty(0, 0, 0, 0, dtype=torch.bool)
# Attributes of a mask [B, K], so that only the first layer waits for the device.
_SPANS = "unspool_spans"
_ROWS = "unspool_rows"

Rows = list[tuple[slice, slice, Tensor | None]]  # per row: real keys, real queries, positions of real queries


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """Return the padding [B, keys] of a batch as a bool mask; None if there is none.

    `transformers` calls it once per forward pass and kind of layer, as registered in `AttentionMaskInterface`.

    Raises:
        ConfigError: The batch or the model needs a mask that our attention does not compute.
    """
    if use_vmap or mask_function is bidirectional_mask_function:
        raise ConfigError(
            f"attn_implementation={OWN_ATTENTION!r} computes causal attention and sliding windows, and this model "
            "builds other attention masks, which are not supported; load it with another attn_implementation."
        )
    # Queries must be the last keys, but a static cache has unused memory after them. Its later offsets are tensors.
    if isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise ConfigError(
            f"attn_implementation={OWN_ATTENTION!r} does not support static KV caches, nor an attention_mask of "
            "another length than the tokens; use the default DynamicCache."
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    return None if all(span == (0, kv_length) for span in real_spans(mask)) else mask


def real_spans(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the first and the last + 1 real token of each row of a mask [B, K]; (0, 0) for a row of padding only."""
    known: tuple[tuple[int, int], ...] | None = getattr(mask, _SPANS, None)
    if known is not None:
        return known
    real = mask.long()
    found = torch.stack([real.argmax(dim=1), mask.shape[1] - real.flip(1).argmax(dim=1), real.sum(dim=1)]).T.tolist()
    spans = []
    for row, (start, end, count) in enumerate(found):
        if count and end - start != count:
            raise ConfigError(
                f"attn_implementation={OWN_ATTENTION!r}: attention_mask of row {row} has padding between tokens; pad "
                'at the start or the end of rows (tokenizer.padding_side="left" for generation).'
            )
        spans.append((start, end) if count else (0, 0))
    setattr(mask, _SPANS, tuple(spans))
    return tuple(spans)


def needs_rows(module: Any, mask: Tensor) -> bool:
    """Return whether rows must be computed one at a time: causal order hides padding at the end only."""
    # Self-Extend hides keys by position, and positions of padding are arbitrary.
    return getattr(module, "self_extend", None) is not None or any(start for start, _ in real_spans(mask))


def attend_rows(
    attend: Callable[..., tuple[Tensor, None]],
    module: Any,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Return [B, Q, H, D], by `attend` over each row's real tokens; zeros where queries are padding."""
    query, key, value = heads
    num_queries = query.shape[2]
    outs = []
    for number, (keys, queries, positions) in enumerate(_rows(mask, num_queries, kwargs.get("position_ids"))):
        row = slice(number, number + 1)
        if queries.start >= queries.stop:
            outs.append(value.new_zeros(1, num_queries, query.shape[1], value.shape[3]))
            continue
        own = query[row, :, queries], key[row, :, keys], value[row, :, keys]
        out, _ = attend(module, *own, None, **kwargs | {"position_ids": positions})
        outs.append(F.pad(out, (0, 0, 0, 0, queries.start, num_queries - queries.stop)))
    return torch.cat(outs)


def _rows(mask: Tensor, num_queries: int, position_ids: Tensor | None) -> Rows:
    known, rows = getattr(mask, _ROWS, (None, None))
    if rows is None or known is not position_ids:
        before = mask.shape[1] - num_queries
        rows = []
        for number, (start, end) in enumerate(real_spans(mask)):
            queries = slice(max(0, start - before), max(0, end - before))
            # Cached keys have no position_ids. Without position_ids, attention places queries at the end of the keys.
            positions = None
            if position_ids is not None and before == 0:
                positions = position_ids[number if len(position_ids) > 1 else 0, queries][None]
            rows.append((slice(start, end), queries, positions))
        setattr(mask, _ROWS, (position_ids, rows))
    found: Rows = rows
    return found


def skip_masks(model: Any) -> None:
    """Let `transformers` skip mask creation when a batch has no attention_mask."""
    backbone = model.base_model
    if _pass_no_mask not in backbone._forward_pre_hooks.values():
        backbone.register_forward_pre_hook(_pass_no_mask, with_kwargs=True)


def _pass_no_mask(backbone: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    given = len(args) > 1 or kwargs.get("attention_mask") is not None
    if given or backbone.config._attn_implementation != OWN_ATTENTION:
        return None
    return args, kwargs | {"attention_mask": NO_MASK}
