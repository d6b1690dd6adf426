"""Self-Extend (Jin et al. 2024): attention at two resolutions, for evaluation without training.

Keys nearer than `window` tokens keep their own distance. Farther keys share one position in groups of `group`
neighbors: queries at ⌊i / group⌋ + window − ⌊window / group⌋, keys at ⌊j / group⌋. One softmax covers both, so no
distance exceeds the trained context length. Scores are computed in blocks of queries, not by a fused kernel.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.models.attention.reference import MAX_SCORES, repeat_kv_heads
from unspool.models.rotary import positions_of, rotate_at


def self_extend_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, kwargs: Mapping[str, Any]
) -> Tensor:
    """Return [B, Q, H, D] of unrotated queries and keys [B, H, S, D]."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"rope self-extend: this model's attention has {name}, which is not supported.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    position_ids, doc_lens = kwargs.get("position_ids"), kwargs.get("doc_lens")
    query_positions, key_positions = positions_of(query, key, position_ids)
    if doc_lens is None:
        return _attend(module, query, key, value, query_positions, key_positions, scale).transpose(1, 2)
    outs = []
    for start, end in pairwise(accumulate(doc_lens, initial=0)):
        positions, own = key_positions[:, start:end], slice(start, end)
        outs.append(_attend(module, query[:, :, own], key[:, :, own], value[:, :, own], positions, positions, scale))
    return torch.cat(outs, dim=2).transpose(1, 2)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    scale: float,
) -> Tensor:
    window, group = module.self_extend
    far_queries = query_positions.div(group, rounding_mode="floor") + window - window // group
    near = rotate_at(query, key, module.head_inv_freq, query_positions, key_positions)
    far = rotate_at(query, key, module.head_inv_freq, far_queries, key_positions.div(group, rounding_mode="floor"))
    near_key, values = repeat_kv_heads(query, near[1], value)
    far_key, _ = repeat_kv_heads(query, far[1], value)
    batch, num_heads, num_queries, _ = query.shape
    size = max(1, min(num_queries, MAX_SCORES // (batch * num_heads * key.shape[2])))
    outs = []
    for start in range(0, num_queries, size):
        some = slice(start, start + size)
        distance = (query_positions[:, some, None] - key_positions[:, None])[:, None]
        scores = torch.where(
            distance < window,
            near[0][:, :, some] @ near_key.transpose(-1, -2),
            far[0][:, :, some] @ far_key.transpose(-1, -2),
        )
        # Masks keys after the query, and in a padded batch the unused memory after the newest key.
        weights = (scores * scale).masked_fill(distance < 0, -torch.inf).softmax(dim=-1)
        outs.append((weights @ values.float()).to(value.dtype))
    return torch.cat(outs, dim=2)
