"""Giving a model its new positions: one raised base, or a base per head.

One base is a setting of `transformers`' own rotary module. A base per head is not: the model's
rotary module is replaced by one that leaves queries and keys alone, and our attention function
rotates each head by itself. Cached keys are then unrotated, and rotated when they are attended to.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.base.errors import ConfigError
from unspool.model.trial import DOC_LEN, alike, last_states
from unspool.position.scaling import Position, RopeShape, Unchanged, frequencies

# Scalings of `transformers` whose frequencies depend on max_position_embeddings.
BY_CONTEXT = ("dynamic", "longrope")


def rope_shape(config: Any) -> RopeShape:
    """What position methods need to know, from a `transformers` config; refuses a model without RoPE."""
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise ConfigError(
            f"model_type {config.model_type!r} has no single RoPE base in its config; "
            "use a model whose positions are rotary in every layer, such as Llama, Qwen or Mistral."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return RopeShape(
        rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        base=float(rope["rope_theta"]),
    )


def apply_position(model: Any, position: Position, context_len: int) -> None:
    """Change `model` in place to the positions of a stage, and its config to match."""
    config = model.config
    rope_type = config.rope_parameters.get("rope_type")
    if isinstance(position, Unchanged) and rope_type in BY_CONTEXT and context_len > config.max_position_embeddings:
        raise ConfigError(
            f"position unchanged: this model's {rope_type} scaling changes with its longest context, so a longer one "
            "would be trained with other positions than it is loaded with later; use method abf."
        )
    config.max_position_embeddings = max(config.max_position_embeddings, context_len)
    if isinstance(position, Unchanged):
        return
    bases = position.bases(rope_shape(config))
    if len(bases) == 1:
        apply_base(model, float(bases[0]))
        return
    if head_bases(model) is None:
        _try_head_bases(model)
    apply_head_bases(model, bases)


def apply_base(model: Any, base: float) -> None:
    """One base for all heads, as plain RoPE: an older scaling of the model is replaced by it."""
    backbone = model.base_model
    if hasattr(backbone, "head_bases"):
        raise ConfigError("position abf: this model already has a base per head (HARPE); keep method harpe.")
    partial = model.config.rope_parameters.get("partial_rotary_factor")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": base} | (
        {"partial_rotary_factor": partial} if partial is not None else {}
    )
    old = backbone.rotary_emb
    backbone.rotary_emb = type(old)(model.config).to(next(model.parameters()).device)


def apply_head_bases(model: Any, bases: np.ndarray) -> None:
    """A base per KV head, the same list in every layer."""
    shape = rope_shape(model.config)
    if shape.rotary_dim != _head_dim(model.config):
        raise ConfigError("position harpe: this model rotates only a part of each head, which is not supported yet.")
    if len(bases) != shape.num_kv_heads:
        raise ConfigError(f"position harpe: {len(bases)} bases for {shape.num_kv_heads} KV heads; give one each.")
    device = next(model.parameters()).device
    inv_freq = torch.from_numpy(frequencies(bases, shape.rotary_dim)).to(device)
    backbone = model.base_model
    backbone.rotary_emb = NoRotation(shape.rotary_dim)
    backbone.head_bases = [float(base) for base in bases]
    for layer in backbone.layers:
        layer.self_attn.register_buffer("head_inv_freq", inv_freq, persistent=False)


def _try_head_bases(model: Any) -> None:
    """Refuse a model that rotates otherwise than we do: pairs of neighbours, or some layers only."""
    shape = rope_shape(model.config)
    apply_base(model, shape.base)
    own = last_states(model, (DOC_LEN,))
    apply_head_bases(model, np.full(shape.num_kv_heads, shape.base))
    if not alike(last_states(model, (DOC_LEN,)), own):
        raise ConfigError(
            f"position harpe: {type(model).__name__} rotates its heads in another way than Llama, "
            "which is not supported yet; use method abf."
        )


def head_bases(model: Any) -> list[float] | None:
    """The base of each KV head, if the model has such."""
    return getattr(model.base_model, "head_bases", None)


class NoRotation(nn.Module):
    """Stands where the model's rotary module stood: cos 1, sin 0."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim

    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self.rotary_dim)
        return hidden.new_ones(1).expand(shape), hidden.new_zeros(1).expand(shape)


def rotate_heads(query: Tensor, key: Tensor, inv_freq: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rotate every KV head, and the query heads that share it, by its own frequencies, in fp32.

    Without packing, keys stand at 0, 1, 2, … and queries are the last of them, so a cache of
    unrotated keys is rotated right whatever was fed when.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries == num_keys and position_ids is not None:
        positions = position_ids.reshape(-1)[:num_keys].float()
    else:
        positions = torch.arange(num_keys, device=key.device, dtype=torch.float32)
    angles = inv_freq[:, None, :] * positions[None, :, None]  # [KV, keys, d/2]
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    groups = query.shape[1] // key.shape[1]
    last = slice(num_keys - num_queries, num_keys)
    query_cos, query_sin = (table[:, last].repeat_interleave(groups, dim=0) for table in (cos, sin))
    return _rotate(query, query_cos, query_sin), _rotate(key, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.float().chunk(2, dim=-1)
    return heads.float() * cos + torch.cat((-second, first), dim=-1) * sin


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
