"""Attention of one new token per prompt to the keys of that prompt, in a padded batch.

Queries are [B, H, 1, D]; keys and values are [B, KV, capacity, D], and each prompt uses its first ones. The output is
[B, 1, H, D], equal to that of each prompt alone up to rounding. Nothing synchronizes with the device, so a step can be
captured in a CUDA graph. Without the flash kernel, the keys of a layer are copied to fp32, and padding is scored too.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from unspool.models.attention import cuda
from unspool.models.attention.reference import (
    AttentionInputs,
    Kernel,
    capped_scores,
    softmax_with_sinks,
    within_window,
)

# Largest fp32 copy of keys, in elements: 512 MiB.
MAX_COPIED = 1 << 27
# Absolute tolerance between bfloat16 and fp32, for outputs of about 1.
TOLERANCE = 0.03


class PaddedAttention:
    """The attention kernel of every layer while a batch of answers is generated."""

    def __init__(self, lengths: Tensor, capacity: int) -> None:
        """`lengths`, int64 [B]: keys of each prompt without the new token's. It may change from step to step."""
        self._lengths = lengths
        self._num_keys = lengths.to(torch.int32) + 1
        self._places = torch.arange(capacity, device=lengths.device)
        self._offsets = padded_offsets(len(lengths), capacity, lengths.device)
        self._masks: dict[int | None, Tensor] = {}

    def start_step(self) -> None:
        """Call this before every step, once for all layers."""
        self._num_keys.copy_(self._lengths + 1)
        self._masks = {}

    def __call__(self, kernel: Kernel, inputs: AttentionInputs) -> Tensor:
        assert inputs.doc_lens is None and inputs.query.shape[2] == 1, "one token of each prompt at a time"
        if inputs.softcap is None and inputs.sinks is None and has_flash_kernel(inputs):
            return flash_attention(inputs, self._num_keys, self._offsets)
        if inputs.window not in self._masks:
            self._masks[inputs.window] = padding_mask(self._num_keys, self._places, inputs.window)
        return masked_attention(inputs, self._masks[inputs.window])


def padding_mask(num_keys: Tensor, places: Tensor, window: int | None) -> Tensor:
    """Return bool[B, capacity]: the keys that the newest token of each prompt sees."""
    return within_window(num_keys[:, None] - 1 - places, window)


def masked_attention(inputs: AttentionInputs, mask: Tensor) -> Tensor:
    """Compute attention on any device and in any dtype, a few prompts at a time: their keys are copied to fp32."""
    query, key, value = inputs.heads
    batch, num_heads, _, dim = query.shape
    num_kv, capacity = key.shape[1], key.shape[2]
    grouped = query.float().reshape(batch, num_kv, -1, dim)
    sinks = None if inputs.sinks is None else inputs.sinks.float().view(1, num_kv, -1, 1)
    size = max(1, MAX_COPIED // (num_kv * capacity * dim))
    outs = []
    for start in range(0, batch, size):
        some = slice(start, start + size)
        scores = capped_scores(grouped[some], key[some].float().contiguous(), inputs.scale, inputs.softcap)
        weights = softmax_with_sinks(scores.masked_fill(~mask[some, None, None], -torch.inf), sinks)
        outs.append(weights @ value[some].float().contiguous())
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(batch, 1, num_heads, -1).to(query.dtype)


def flash_attention(inputs: AttentionInputs, num_keys: Tensor, offsets: tuple[Tensor, Tensor]) -> Tensor:
    """Run FlashAttention-2 on prompts with space for `capacity` keys; it reads the first `num_keys` of each."""
    query, key, value = inputs.heads
    batch, num_heads, _, dim = query.shape
    # Views, because keys are laid out by token. With a base per head, keys are rotated in every step and copied here.
    keys, values = (cached.transpose(1, 2).reshape(-1, cached.shape[1], cached.shape[3]) for cached in (key, value))
    window = (-1, -1) if inputs.window is None else (inputs.window - 1, 0)
    forward: Any = torch.ops.aten._flash_attention_forward
    out: Tensor = forward(
        query[:, :, 0].contiguous(),
        keys,
        values,
        *offsets,
        1,
        key.shape[2],
        0.0,
        False,
        False,
        scale=inputs.scaling,
        window_size_left=window[0],
        window_size_right=window[1],
        seqused_k=num_keys,
    )[0]
    return out.view(batch, 1, num_heads, dim)


def padded_offsets(batch: int, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets of prompts among queries and among padded keys, as the kernel takes them."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return starts, starts * capacity


def has_flash_kernel(inputs: AttentionInputs) -> bool:
    query, key, _ = inputs.heads
    if not cuda.supports(*inputs.heads):
        return False
    return flash_kernel_is_correct(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[-1])


@cache
def flash_kernel_is_correct(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv: int, dim: int) -> bool:
    """Return whether this torch's kernel respects `seqused_k` on this device; tested once.

    The operator is not public, so other versions of torch may change it.
    """
    # Long enough that the kernel splits the keys among its blocks, as it does for few prompts.
    capacity, batch = 600, 3
    numbers = torch.arange(batch * capacity * (num_heads + 2 * num_kv) * dim, device=device, dtype=torch.float32)
    heads = (numbers * 0.7).sin().to(dtype).view(batch, capacity, -1, dim)
    query, key, value = torch.split(heads, [num_heads, num_kv, num_kv], dim=2)
    query, key, value = query[:, :1], key.contiguous(), value.contiguous()
    num_keys = torch.tensor([5, capacity // 2, capacity], dtype=torch.int32, device=device)
    for at, count in enumerate(num_keys.tolist()):
        # Keys that the kernel must not read would outweigh all others.
        key[at, count:], value[at, count:] = 4 * query[at, 0, :1], 100
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    try:
        for window in (None, 3):
            inputs = AttentionInputs(query=query, key=key, value=value, window=window)
            found = flash_attention(inputs, num_keys, padded_offsets(batch, capacity, device))
            mask = padding_mask(num_keys, torch.arange(capacity, device=device), window)
            wanted = masked_attention(inputs.with_heads(query.float(), key, value), mask)
            if not torch.allclose(found.float(), wanted, atol=TOLERANCE):
                return False
    except (RuntimeError, TypeError, AttributeError):
        return False
    return True
