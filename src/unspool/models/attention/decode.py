"""Attention of one new token of each prompt to the keys of its own prompt, which lie padded in one batch.

In: queries [B, H, 1, D]; keys and values [B, KV, room, D], the newest among them; on the device, how many of them each
prompt has. Out: [B, 1, H, D].
Promise: the numbers of each prompt alone, up to rounding; KV heads are not repeated; nothing waits for the device, so
that a step can be captured; sliding windows, capped scores and sinks are followed.
Price: without the kernel, the keys of a layer in fp32 and scores for the padding.
Elsewhere: where keys lie and what is fed (decode.py).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unspool.models.attention import cuda
from unspool.models.attention.reference import Rules

# Numbers in fp32 that a copy of keys may have at a time: 512 MiB.
MOST_COPIED = 1 << 27
# Of outputs about as large as 1, between bfloat16 and fp32.
TOLERANCE = 0.03


class OwnKeys:
    """Stands between a layer and its kernel while answers are written, for all layers of one batch."""

    def __init__(self, lengths: Tensor, room: int) -> None:
        """`lengths`: int64 [B], keys of each prompt without the new token's; it may change from step to step."""
        self._lengths = lengths
        self._seen = lengths.to(torch.int32) + 1
        self._keys = torch.arange(room, device=lengths.device)
        self._borders = borders(len(lengths), room, lengths.device)
        self._masks: dict[int | None, Tensor] = {}

    def feed(self) -> None:
        """Before every step, once for all layers."""
        self._seen.copy_(self._lengths + 1)
        self._masks = {}

    def __call__(
        self,
        compute: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rules: Rules,
        sinks: Tensor | None,
        doc_lens: tuple[int, ...] | None,
    ) -> Tensor:
        assert doc_lens is None and query.shape[2] == 1, "one token of each prompt at a time"
        if rules.softcap is None and sinks is None and has_kernel(query, key, value):
            return by_kernel(query, key, value, rules, self._seen, self._borders)
        return by_hand(query, key, value, rules, sinks, self._mask(rules.window))

    def _mask(self, window: int | None) -> Tensor:
        kept = self._masks.get(window)
        if kept is None:
            kept = self._masks[window] = visible(self._seen, self._keys, window)
        return kept


def visible(seen: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """bool[B, room]."""
    behind = seen[:, None] - 1 - keys
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def by_hand(query: Tensor, key: Tensor, value: Tensor, rules: Rules, sinks: Tensor | None, mask: Tensor) -> Tensor:
    """For any device and dtype and any rule; a few prompts at a time, where their keys have to be copied to fp32."""
    batch, num_heads, _, dim = query.shape
    num_kv, room = key.shape[1], key.shape[2]
    scale = dim**-0.5 if rules.scaling is None else rules.scaling
    # Query heads stand beside the KV head they share.
    grouped = query.float().reshape(batch, num_kv, -1, dim)
    size = max(1, MOST_COPIED // (num_kv * room * dim))
    outs = []
    for start in range(0, batch, size):
        some = slice(start, start + size)
        scores = grouped[some] @ key[some].float().contiguous().transpose(-1, -2) * scale
        if rules.softcap is not None:
            scores = torch.tanh(scores / rules.softcap) * rules.softcap
        scores = scores.masked_fill(~mask[some, None, None], -torch.inf)
        if sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            # A sink takes part in the softmax and has nothing to say.
            sink = sinks.float().view(1, num_kv, -1, 1)
            weights = (scores - torch.logaddexp(scores.logsumexp(dim=-1, keepdim=True), sink)).exp()
        outs.append(weights @ value[some].float().contiguous())
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(batch, 1, num_heads, -1).to(query.dtype)


def by_kernel(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, seen: Tensor, borders: tuple[Tensor, Tensor]
) -> Tensor:
    """FlashAttention-2 on documents of `room` keys, of which it looks at the first `seen` of each."""
    batch, num_heads, _, dim = query.shape
    # Views, since they lie by token; keys with a base per head are rotated anew in every step and have to be copied.
    keys, values = (kept.transpose(1, 2).reshape(-1, kept.shape[1], kept.shape[3]) for kept in (key, value))
    window = (-1, -1) if rules.window is None else (rules.window - 1, 0)
    forward: Any = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(
        query[:, :, 0].contiguous(),
        keys,
        values,
        *borders,
        1,
        key.shape[2],
        0.0,
        False,
        False,
        scale=rules.scaling,
        window_size_left=window[0],
        window_size_right=window[1],
        seqused_k=seen,
    )[0]
    return out.view(batch, 1, num_heads, dim)


def borders(batch: int, room: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where prompts begin and end among queries and among padded keys, as the kernel wants it."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return starts, starts * room


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not cuda.fits(query, key, value):
        return False
    return agrees(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1])


@cache
def agrees(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv: int, dim: int) -> bool:
    """Whether the kernel of this torch on this device looks at as many keys as it is told; tried once.

    The operator is not a public one, and another torch may have another.
    """
    # Long enough that the kernel divides keys among its blocks, as it does for few prompts.
    room, batch = 600, 3
    numbers = torch.arange(batch * room * (num_heads + 2 * num_kv) * dim, device=device, dtype=torch.float32)
    heads = (numbers * 0.7).sin().to(dtype).view(batch, room, -1, dim)
    query, key, value = torch.split(heads, [num_heads, num_kv, num_kv], dim=2)
    query, key, value = query[:, :1], key.contiguous(), value.contiguous()
    seen = torch.tensor([5, room // 2, room], dtype=torch.int32, device=device)
    for at, count in enumerate(seen.tolist()):
        # What the kernel must not look at would outweigh all the rest.
        key[at, count:], value[at, count:] = 4 * query[at, 0, :1], 100
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    try:
        for window in (None, 3):
            rules = Rules(window=window)
            mask = visible(seen, torch.arange(room, device=device), window)
            found = by_kernel(query, key, value, rules, seen, borders(batch, room, device))
            if not torch.allclose(found.float(), by_hand(query.float(), key, value, rules, None, mask), atol=TOLERANCE):
                return False
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True
