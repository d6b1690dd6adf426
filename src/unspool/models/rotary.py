"""Giving a model its new positions: other RoPE settings, or a base per head.

Settings are what `transformers` itself reads: the config is changed and the model's rotary module built anew from
it, so that a later load computes the very same tables; they are compared with our own before any use. Where a model
has several kinds of layers with positions of their own (Gemma 3, Olmo 3), those that see the whole context are
extended; sliding layers, whose window does not grow, keep theirs.
A base per head is no such setting: the model's rotary module is replaced by one that leaves queries and keys alone,
and our attention function rotates each head by itself. Cached keys are then unrotated, and rotated when they are
attended to.
Elsewhere: which settings a method asks for (position/scaling.py), what they mean (position/rope.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.checks import DOC_LEN, is_close, last_states
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

# Scalings of `transformers` whose meaning depends on max_position_embeddings: of `yarn` in some versions.
BY_CONTEXT = ("dynamic", "longrope", "yarn")
# Relative: `transformers` blends in float32, which costs it up to 1e-5; bfloat16 would be off by 4e-3.
TOLERANCE = 1e-4


def rope_shape(config: Any) -> RopeShape:
    """What position methods need to know, from a `transformers` config; refuses a model without RoPE."""
    return shape_of(config.to_dict())


def apply_rope(model: Any, position: RopeMethod, context_len: int) -> None:
    """Change `model` in place to the positions of a stage, and its config to match."""
    if position.keeps_frequencies:
        _keep(model.config, context_len)
        return
    settled = position.resolve(rope_shape(model.config), context_len)
    if settled.head_bases is None:
        assert settled.parameters is not None
        _refuse_head_bases(model, position.method)
        apply_parameters(model, settled.parameters, settled.max_positions)
        return
    if head_bases(model) is None:
        _try_head_bases(model)
    num_layers = len(model.base_model.layers)
    rows = np.stack([np.roll(settled.head_bases, layer * settled.rotate_by_layer) for layer in range(num_layers)])
    apply_head_bases(model, rows)
    model.config.max_position_embeddings = settled.max_positions


def _keep(config: Any, context_len: int) -> None:
    if context_len <= config.max_position_embeddings:
        return
    rope_type = global_parameters(config.to_dict())["rope_type"]
    if rope_type in BY_CONTEXT:
        raise ConfigError(
            f"rope unchanged: this model's {rope_type} scaling changes with its longest context, so at "
            f"{format_size(context_len)} it would be trained with other positions than it is loaded with later; "
            f"use method abf, or {rope_type} anew."
        )
    config.max_position_embeddings = context_len


# Settings of `transformers`


def apply_base(model: Any, base: float) -> None:
    """One base for all heads, as plain RoPE: an older scaling of the model is replaced by it."""
    _refuse_head_bases(model, "abf")
    apply_parameters(model, one_base(base), model.config.max_position_embeddings)


def apply_parameters(model: Any, parameters: dict[str, Any], max_positions: int) -> None:
    """Write `rope_parameters` of the layers that see the whole context, and build the rotary module anew."""
    config, backbone = model.config, model.base_model
    partial = global_parameters(config.to_dict()).get("partial_rotary_factor")
    parameters = parameters | ({} if partial is None else {"partial_rotary_factor": partial})
    nested = is_nested(config.rope_parameters)
    config.rope_parameters = config.rope_parameters | {GLOBAL_LAYERS: parameters} if nested else parameters
    config.max_position_embeddings = max_positions
    original = parameters.get("original_max_position_embeddings")
    if original is not None and hasattr(config, "original_max_position_embeddings"):
        # Phi-3 has the length in both places, and `transformers` goes by this one.
        config.original_max_position_embeddings = original
    if config.to_dict().get("head_dim", 0) is None:
        # `transformers` takes a head_dim of None for a number where it computes scalings (Mixtral).
        config.head_dim = config.hidden_size // config.num_attention_heads
    try:
        config.validate_rope()
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"model_type {config.model_type!r} does not allow rope_type {parameters['rope_type']!r} in its config "
            f"({first_line(error)}); use method abf."
        ) from error
    others = [name for name, module in backbone.named_modules() if name != "rotary_emb" and _turns(module)]
    if others:
        raise ConfigError(
            f"{type(model).__name__} computes rotations in several places ({', '.join(others[:2])}), which is not "
            "supported; use rope method unchanged."
        )
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(next(model.parameters()).device)
    _check_tables(model)


def _turns(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _check_tables(model: Any) -> None:
    """Refuse a model whose rotary module makes something else of the settings than we and they mean."""
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
            f"{type(model).__name__} computes other frequencies from rope_type {parameters['rope_type']!r} than it "
            "should, so its positions cannot be changed this way; use method abf, or a model such as Llama or Qwen."
        )


# A base per head


def apply_head_bases(model: Any, bases: np.ndarray | Sequence[Any]) -> None:
    """A base per KV head: [KV heads] for all layers, or [layers, KV heads]."""
    config, backbone = model.config, model.base_model
    if is_nested(config.rope_parameters):
        raise ConfigError(
            "rope harpe: this model has positions of their own in its sliding layers, where a base per head is "
            "not supported; use method abf, which extends the other layers."
        )
    shape = rope_shape(config)
    rows = np.atleast_2d(np.asarray(bases, dtype=np.float64))
    if rows.shape[-1] != shape.num_kv_heads:
        raise ConfigError(f"rope harpe: {rows.shape[-1]} bases for {shape.num_kv_heads} KV heads; give one each.")
    if len(rows) not in (1, len(backbone.layers)):
        raise ConfigError(f"rope harpe: bases for {len(rows)} layers, and there are {len(backbone.layers)}.")
    device = next(model.parameters()).device
    backbone.rotary_emb = NoRotation(shape.rotary_dim)
    same = bool((rows == rows[0]).all())
    # One list says the same as many equal ones, and is what a reader of the config can check.
    backbone.head_bases = rows[0].tolist() if same else rows.tolist()
    for layer, row in zip(backbone.layers, np.broadcast_to(rows, (len(backbone.layers), rows.shape[-1])), strict=True):
        inv_freq = torch.from_numpy(frequencies(row, shape.rotary_dim)).to(device)
        layer.self_attn.register_buffer("head_inv_freq", inv_freq, persistent=False)


def _try_head_bases(model: Any) -> None:
    """Refuse a model that rotates otherwise than we do: pairs of neighbours, or some layers only."""
    shape, layers = rope_shape(model.config), getattr(model.base_model, "layers", ())
    refusal = ConfigError(
        f"rope harpe: {type(model).__name__} rotates its heads in another way than Llama, "
        "which is not supported yet; use method abf."
    )
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise refusal
    apply_base(model, shape.base)
    own = last_states(model, (DOC_LEN,))
    apply_head_bases(model, np.full(shape.num_kv_heads, shape.base))
    try:
        found = last_states(model, (DOC_LEN,))
    except RuntimeError:  # tables of another shape than this model's code expects
        raise refusal from None
    if not is_close(found, own):
        raise refusal


def _refuse_head_bases(model: Any, method: str) -> None:
    if head_bases(model) is not None:
        raise ConfigError(f"rope {method}: this model already has a base per head (HARPE); keep method harpe.")


def head_bases(model: Any) -> Any:
    """The base of each KV head, if the model has such: one list, or one per layer where layers differ."""
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

    Where a model turns only the first part of each head, `inv_freq` is that much shorter and the rest is left alone.
    Without packing, keys stand at 0, 1, 2, … and queries where `position_ids` [B, queries] say, or at the end; so a
    cache of unrotated keys is rotated right whatever was fed when, also of several texts side by side.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_whole = num_queries == num_keys
    if is_whole and position_ids is not None:
        positions = position_ids.reshape(-1)[:num_keys].float()
    else:
        positions = torch.arange(num_keys, device=key.device, dtype=torch.float32)
    cos, sin = _tables(inv_freq, positions)
    if is_whole or position_ids is None:
        last = slice(num_keys - num_queries, num_keys)
        query_cos, query_sin = cos[None, :, None, last], sin[None, :, None, last]
    else:
        query_cos, query_sin = (table[:, :, None] for table in _tables(inv_freq, position_ids.float()))
    groups = query.shape[1] // key.shape[1]
    # As [B, KV, groups, S, D], so that the tables are shared instead of copied for each query head.
    grouped = query.reshape(len(query), key.shape[1], groups, num_queries, -1)
    return _rotate(grouped, query_cos, query_sin).flatten(1, 2), _rotate(key, cos, sin)


def _tables(inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., KV, S, d/2] of positions [..., S]."""
    angles = inv_freq[:, None, :] * positions[..., None, :, None]
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = heads.float().tensor_split((half, 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
