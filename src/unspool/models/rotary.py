"""Applying a RoPE method to a model: other RoPE settings, or a base per head.

Settings are those that `transformers` itself reads: the config is changed and the model's rotary module rebuilt from
it, so that a later load computes the same tables. They are compared with our own before use. In models whose layer
types have their own settings (Gemma 3, Olmo 3), the layers that see the whole context are extended; sliding layers,
whose window does not grow, keep theirs.

`transformers` has no setting for a base per head. There, a module that does nothing replaces the model's rotary module,
and our attention function rotates each head. Cached keys are then unrotated, and rotated when they are attended to.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.checks import DOC_LEN, is_close, last_states
from unspool.models.modeling_harpe import ROPE_TYPE
from unspool.models.tokenizer import first_line
from unspool.rope.tables import (
    GLOBAL_LAYERS,
    RopeMethod,
    RopeShape,
    frequencies,
    global_parameters,
    is_nested,
    one_base,
    shape_of,
    tables,
)

# Scalings of `transformers` that depend on max_position_embeddings (`yarn` in some versions).
USES_MAX_POSITIONS = ("dynamic", "longrope", "yarn")
# The name under which attention/interface.py registers our attention.
OWN_ATTENTION = "unspool"
# Relative: `transformers` blends in float32, with errors up to 1e-5; bfloat16 would have 4e-3.
TOLERANCE = 1e-4


def rope_shape(config: Any) -> RopeShape:
    """Read what RoPE methods need to know from a `transformers` config; ConfigError for a model without RoPE."""
    return shape_of(config.to_dict())


def apply_rope(model: Any, method: RopeMethod, context_len: int) -> None:
    """Change the positions of `model` in place, and its config to match."""
    if method.keeps_frequencies:
        _extend_context(model.config, context_len)
        return
    settings = method.resolve(rope_shape(model.config), context_len)
    if settings.head_bases is None:
        assert settings.parameters is not None
        _refuse_head_bases(model, method.method)
        apply_parameters(model, settings.parameters, settings.max_positions)
        return
    if head_bases(model) is None:
        _check_rotation(model)
    num_layers = len(model.base_model.layers)
    by_layer = [np.roll(settings.head_bases, layer * settings.rotate_by_layer) for layer in range(num_layers)]
    apply_head_bases(model, np.stack(by_layer))
    model.config.max_position_embeddings = settings.max_positions


def _extend_context(config: Any, context_len: int) -> None:
    if context_len <= config.max_position_embeddings:
        return
    rope_type = global_parameters(config.to_dict())["rope_type"]
    if rope_type in USES_MAX_POSITIONS:
        raise ConfigError(
            f"rope unchanged: this model's {rope_type} scaling depends on max_position_embeddings, so at "
            f"{format_size(context_len)} it would be trained with other positions than it is loaded with later; "
            f"use method abf, or {rope_type} again."
        )
    config.max_position_embeddings = context_len


# Settings of `transformers`


def apply_base(model: Any, base: float) -> None:
    """Set one base for all heads, as plain RoPE; it replaces an older scaling of the model."""
    _refuse_head_bases(model, "abf")
    apply_parameters(model, one_base(base), model.config.max_position_embeddings)


def apply_parameters(model: Any, parameters: dict[str, Any], max_positions: int) -> None:
    """Write `rope_parameters` of the layers that see the whole context, and rebuild the rotary module."""
    config, backbone = model.config, model.base_model
    partial = global_parameters(config.to_dict()).get("partial_rotary_factor")
    parameters = parameters | ({} if partial is None else {"partial_rotary_factor": partial})
    nested = is_nested(config.rope_parameters)
    config.rope_parameters = config.rope_parameters | {GLOBAL_LAYERS: parameters} if nested else parameters
    config.max_position_embeddings = max_positions
    original = parameters.get("original_max_position_embeddings")
    if original is not None and hasattr(config, "original_max_position_embeddings"):
        # Phi-3 stores the length in both places, and `transformers` uses this one.
        config.original_max_position_embeddings = original
    if config.to_dict().get("head_dim", 0) is None:
        # `transformers` computes scalings with head_dim even if it is None (Mixtral).
        config.head_dim = config.hidden_size // config.num_attention_heads
    try:
        config.validate_rope()
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model_type {config.model_type!r} does not allow rope_type {parameters['rope_type']!r} in its config "
            f"({first_line(error)}); use method abf."
        ) from error
    others = [name for name, module in backbone.named_modules() if name != "rotary_emb" and _has_frequencies(module)]
    if others:
        raise ConfigError(
            f"{type(model).__name__} computes rotations in several places ({', '.join(others[:2])}), which is not "
            "supported; use rope method unchanged."
        )
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(next(model.parameters()).device)
    _check_tables(model)


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _check_tables(model: Any) -> None:
    """Refuse a model whose rotary module computes other frequencies from the settings than we do."""
    config, rotary = model.config.to_dict(), model.base_model.rotary_emb
    prefix = f"{GLOBAL_LAYERS}_" if is_nested(model.config.rope_parameters) else ""
    if not hasattr(rotary, f"{prefix}inv_freq"):
        raise ConfigError(f"{type(model).__name__} has no layer that sees the whole context; use another model.")
    parameters = global_parameters(config)
    wanted = tables(parameters, shape_of(config).rotary_dim, max_positions=model.config.max_position_embeddings)
    found = getattr(rotary, f"{prefix}inv_freq").double().cpu().numpy()
    factor = getattr(rotary, f"{prefix}attention_scaling")
    same = found.shape == wanted.inv_freq.shape and np.allclose(found, wanted.inv_freq, rtol=TOLERANCE, atol=0)
    if not same or not np.isclose(factor, wanted.attention_factor, rtol=TOLERANCE):
        raise ConfigError(
            f"{type(model).__name__} computes unexpected frequencies from rope_type {parameters['rope_type']!r}, so "
            "its positions cannot be changed this way; use method abf, or a model such as Llama or Qwen."
        )


# A base per head


def apply_head_bases(model: Any, bases: np.ndarray | Sequence[Any]) -> None:
    """Set a base per KV head: [KV heads] for all layers, or [layers, KV heads]."""
    config, backbone = model.config, model.base_model
    if is_nested(config.rope_parameters):
        raise ConfigError(
            "rope harpe: the sliding layers of this model have their own RoPE settings, where a base per head is not "
            "supported; use method abf, which extends the other layers."
        )
    shape = rope_shape(config)
    by_layer = np.atleast_2d(np.asarray(bases, dtype=np.float64))
    num_bases, num_layers = by_layer.shape[-1], len(backbone.layers)
    if num_bases != shape.num_kv_heads:
        raise ConfigError(f"rope harpe: {num_bases} bases for {shape.num_kv_heads} KV heads; give one each.")
    if len(by_layer) not in (1, num_layers):
        raise ConfigError(f"rope harpe: bases for {len(by_layer)} layers, and the model has {num_layers}.")
    device = next(model.parameters()).device
    backbone.rotary_emb = NoRotation(shape.rotary_dim, config)
    # One list for all layers if they are equal: shorter, and easier to check in the config.
    backbone.head_bases = (by_layer[0] if (by_layer == by_layer[0]).all() else by_layer).tolist()
    # Kept when a user saves the model, with a rope_type that plain classes refuse.
    config.head_bases = backbone.head_bases
    config.rope_parameters = config.rope_parameters | {"rope_type": ROPE_TYPE}
    for layer, of_layer in zip(backbone.layers, np.broadcast_to(by_layer, (num_layers, num_bases)), strict=True):
        inv_freq = torch.from_numpy(frequencies(of_layer, shape.rotary_dim)).to(device)
        layer.self_attn.register_buffer("head_inv_freq", inv_freq, persistent=False)


def _check_rotation(model: Any) -> None:
    """Refuse a model that rotates otherwise than we do: neighboring pairs of dimensions, or some layers only."""
    shape, layers = rope_shape(model.config), getattr(model.base_model, "layers", ())
    refusal = ConfigError(
        f"rope harpe: {type(model).__name__} rotates its heads in another way than Llama, "
        "which is not supported yet; use method abf."
    )
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise refusal
    if model.config._attn_implementation != OWN_ATTENTION:
        raise ConfigError(
            'rope harpe: a base per head needs attn_implementation="unspool"; load the model with load_model.'
        )
    apply_base(model, shape.base)
    own = last_states(model, (DOC_LEN,))
    apply_head_bases(model, np.full(shape.num_kv_heads, shape.base))
    try:
        found = last_states(model, (DOC_LEN,))
    except RuntimeError:  # this model's code expects tables of another shape
        raise refusal from None
    if not is_close(found, own):
        raise refusal


def _refuse_head_bases(model: Any, method: str) -> None:
    if head_bases(model) is not None:
        raise ConfigError(f"rope {method}: this model already has a base per head (HARPE); keep method harpe.")


def head_bases(model: Any) -> Any:
    """Return the base of each KV head: one list, or one per layer if layers differ; None for other models."""
    return getattr(model.base_model, "head_bases", None)


def plain_config(config: Any) -> Any:
    """Return a copy of a model's config, without a base per head, from which its plain class can be built."""
    plain = copy.deepcopy(config)
    if getattr(plain, "head_bases", None) is not None:
        del plain.head_bases
        plain.rope_parameters = plain.rope_parameters | {"rope_type": "default"}
    return plain


class NoRotation(nn.Module):
    """Replaces the model's rotary module: cos 1, sin 0, because our attention rotates. Refuses any other attention."""

    def __init__(self, rotary_dim: int, config: Any) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self._config = config

    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._config._attn_implementation != OWN_ATTENTION:
            raise ConfigError(
                f"HARPE: attention {self._config._attn_implementation!r} knows no base per head, so every position "
                f"would be lost; use attn_implementation={OWN_ATTENTION!r}, or export the model and load that folder "
                "with trust_remote_code=True."
            )
        shape = (*position_ids.shape, self.rotary_dim)
        return hidden.new_ones(1).expand(shape), hidden.new_zeros(1).expand(shape)


def rotate_heads(query: Tensor, key: Tensor, inv_freq: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rotate every KV head, and the query heads that share it, by its own frequencies, in fp32.

    If a model rotates only the first part of each head, `inv_freq` is that much shorter and the rest stays as it is.
    Without packing, keys are at 0, 1, 2, … and queries at `position_ids` [B, queries], or at the end. So a cache of
    unrotated keys gets the right positions however it was filled, also for several texts in a batch.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_whole = num_queries == num_keys
    if is_whole and position_ids is not None:
        positions = position_ids[:, :num_keys].float()
    else:
        positions = torch.arange(num_keys, device=key.device, dtype=torch.float32)[None]
    cos, sin = _tables(inv_freq, positions)
    if is_whole or position_ids is None:
        last = slice(num_keys - num_queries, num_keys)
        query_cos, query_sin = cos[:, :, None, last], sin[:, :, None, last]
    else:
        query_cos, query_sin = (table[:, :, None] for table in _tables(inv_freq, position_ids.float()))
    groups = query.shape[1] // key.shape[1]
    # As [B, KV, groups, S, D], so that the tables are shared instead of copied for each query head.
    grouped = query.reshape(len(query), key.shape[1], groups, num_queries, -1)
    return _rotate(grouped, query_cos, query_sin).flatten(1, 2), _rotate(key, cos, sin)


def _tables(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., KV, S, d/2] of positions [..., S]."""
    angles = inv_freq[:, None, :] * positions[..., None, :, None]
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = heads.float().tensor_split((half, 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
