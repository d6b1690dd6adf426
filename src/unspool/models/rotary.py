"""Apply a RoPE method to a model: new RoPE settings, or a base per head.

Settings are written to the model's config, and the rotary module is rebuilt from it, so that a later load computes the
same tables. The tables are compared with our own before use. Some models have settings per layer type (Gemma 3, Olmo
3). There, only layers with full attention are extended; sliding-window layers keep their settings.

`longrope` and `dynamic` choose frequencies by the input length. We use the length of each token's document
(`decide_by_document`), regardless of other documents, earlier batches or other ranks.

`transformers` has no setting for a base per head. For it, `NoRotation` replaces the model's rotary module, and our
attention function rotates each head. Keys are cached unrotated, and rotated in every attention call.
"""

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.attention_scale import scale_attention
from unspool.models.checks import DOC_LEN, is_close, last_states
from unspool.models.location import first_line
from unspool.models.modeling_harpe import ROPE_TYPE
from unspool.rope.tables import (
    GLOBAL_LAYERS,
    RopeMethod,
    RopeShape,
    divided,
    frequencies,
    global_parameters,
    is_divided,
    is_nested,
    one_base,
    shape_of,
    tables,
)

# Scalings of `transformers` that depend on max_position_embeddings (`yarn` in some versions).
USES_MAX_POSITIONS = ("dynamic", "longrope", "yarn")
# Scalings whose frequencies depend on the input length.
USES_INPUT_LENGTH = ("dynamic", "longrope")
# The name under which attention/interface.py registers our attention.
OWN_ATTENTION = "unspool"
# Relative tolerance: `transformers` blends in float32, with errors up to 1e-5; bfloat16 would give 4e-3.
TOLERANCE = 1e-4


def rope_shape(config: Any) -> RopeShape:
    """Read the shape that RoPE methods need from a `transformers` config; ConfigError for a model without RoPE."""
    return shape_of(config.to_dict())


def apply_rope(model: Any, method: RopeMethod, context_len: int) -> None:
    """Apply a RoPE method to `model` and its config, in place."""
    _apply_settings(model, method, context_len)
    if method.attention_scale is not None:
        scale_attention(model, method.attention_scale)


def _apply_settings(model: Any, method: RopeMethod, context_len: int) -> None:
    if method.keeps_frequencies:
        _extend_context(model, context_len)
        return
    settings = method.resolve(rope_shape(model.config), context_len)
    if settings.head_bases is None:
        assert settings.parameters is not None
        _refuse_head_bases(model, method.method)
        apply_parameters(model, settings.parameters, settings.max_positions)
        return
    if settings.self_extend is not None:
        scaling = global_parameters(model.config.to_dict())["rope_type"]
        if scaling != "default" or head_bases(model) is not None:
            raise ConfigError(
                f"rope {method.method}: the model's RoPE scaling is {scaling}, which this method cannot keep; use "
                "a model with plain RoPE."
            )
    if head_bases(model) is None:
        _check_rotation(model)
    num_layers = len(model.base_model.layers)
    by_layer = [np.roll(settings.head_bases, layer * settings.rotate_by_layer) for layer in range(num_layers)]
    apply_head_bases(model, np.stack(by_layer))
    for layer in model.base_model.layers:
        layer.self_attn.self_extend = settings.self_extend
    model.config.max_position_embeddings = settings.max_positions


def _extend_context(model: Any, context_len: int) -> None:
    config = model.config
    if context_len <= config.max_position_embeddings:
        return
    parameters = global_parameters(config.to_dict())
    if is_divided(parameters):
        same = divided(parameters["rope_theta"], parameters["short_factor"], context_len)
        apply_parameters(model, same, context_len)
        return
    rope_type = parameters["rope_type"]
    if rope_type in USES_MAX_POSITIONS:
        raise ConfigError(
            f"rope unchanged: this model's {rope_type} scaling depends on max_position_embeddings, so at "
            f"{format_size(context_len)} its positions in training would differ from those after loading; "
            f"use method abf, or {rope_type} again."
        )
    config.max_position_embeddings = context_len


# Settings of `transformers`


def apply_base(model: Any, base: float) -> None:
    """Set one base for all heads, as in plain RoPE, and remove an earlier scaling."""
    _refuse_head_bases(model, "abf")
    apply_parameters(model, one_base(base), model.config.max_position_embeddings)


def apply_parameters(model: Any, parameters: dict[str, Any], max_positions: int) -> None:
    """Write `rope_parameters` of the layers with full attention, and rebuild the rotary module."""
    config, backbone = model.config, model.base_model
    partial = global_parameters(config.to_dict()).get("partial_rotary_factor")
    parameters = parameters | ({} if partial is None else {"partial_rotary_factor": partial})
    nested = is_nested(config.rope_parameters)
    config.rope_parameters = config.rope_parameters | {GLOBAL_LAYERS: parameters} if nested else parameters
    config.max_position_embeddings = max_positions
    original = parameters.get("original_max_position_embeddings")
    if original is not None and hasattr(config, "original_max_position_embeddings"):
        # Phi-3 stores the length in both places, and `transformers` reads this one.
        config.original_max_position_embeddings = original
    if config.to_dict().get("head_dim", 0) is None:
        # `transformers` computes scalings from head_dim even if it is None (Mixtral).
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
            f"{type(model).__name__} computes rotations in several modules ({', '.join(others[:2])}), which is not "
            "supported; use rope method unchanged."
        )
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(next(model.parameters()).device)
    _check_tables(model)


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _check_tables(model: Any) -> None:
    """Refuse a model whose rotary module computes other frequencies than we do."""
    config, rotary = model.config.to_dict(), model.base_model.rotary_emb
    prefix = f"{GLOBAL_LAYERS}_" if is_nested(model.config.rope_parameters) else ""
    if not hasattr(rotary, f"{prefix}inv_freq"):
        raise ConfigError(f"{type(model).__name__} has no layer with full attention; use another model.")
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


# Frequencies that depend on the input length


Spans = tuple[tuple[int, int], ...]  # in token order: number of tokens, and length of their whole document


def decide_by_document(model: Any) -> None:
    """Make `longrope` and `dynamic` choose frequencies by each document's own length, as if it were alone.

    `transformers` uses the largest of all `position_ids`. In a packed batch that is another document's, and on a rank
    with a part of the row it is too small. Call this once for every new model.
    """
    backbone = model.base_model
    own = type(backbone.rotary_emb)
    backbone.rotary_emb.__class__ = type(own.__name__, (_ByDocument, own), {})
    backbone.register_forward_pre_hook(_note_documents, with_kwargs=True)
    backbone.register_forward_hook(_forget_documents, always_call=True)


def depends_on_length(model: Any) -> bool:
    """Return whether the frequencies of some layers depend on the input length."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    by_layer_type = parameters.values() if is_nested(parameters) else [parameters]
    return any(uses_input_length(each) for each in by_layer_type)


def uses_input_length(parameters: dict[str, Any] | None) -> bool:
    """Return whether frequencies from these `rope_parameters` depend on the input length; CoPE's and DroPE's do not."""
    if not parameters or parameters.get("rope_type") not in USES_INPUT_LENGTH:
        return False
    return not is_divided(parameters)


def decides_by_document(model: Any) -> bool:
    """Return whether `decide_by_document` was called for a model whose frequencies depend on the input length."""
    return depends_on_length(model) and isinstance(model.base_model.rotary_emb, _ByDocument)


def same_frequencies(model: Any, lengths: Sequence[int]) -> bool:
    """Return whether such a model uses the same frequencies for all these lengths."""
    parameters = model.config.get_text_config().rope_parameters
    by_layer_type = parameters.values() if is_nested(parameters) else [parameters]
    dependent = [each for each in by_layer_type if uses_input_length(each)]
    relevant = model.base_model.rotary_emb._relevant_length
    return all(len({relevant(length, each) for length in lengths}) == 1 for each in dependent)


def _note_documents(backbone: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    spans, doc_lens = kwargs.pop("rope_spans", None), kwargs.get("doc_lens")
    if spans is None and doc_lens is not None:
        spans = tuple(zip(doc_lens, doc_lens, strict=True))
    backbone.rotary_emb.spans = spans
    return args, kwargs


def _forget_documents(backbone: Any, *_: Any) -> None:
    backbone.rotary_emb.spans = None


class _ByDocument(nn.Module):
    """Mixin before a model's own rotary class; it is rebuilt from a config in the same way."""

    spans: Spans | None = None  # of the current forward pass; None: one document with all of its positions

    def forward(self, hidden: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        rotate: Any = super().forward
        named = {} if layer_type is None else {"layer_type": layer_type}
        config: Any = self.config
        settings = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        if not uses_input_length(settings):
            return rotate(hidden, position_ids, **named)
        if self.spans is None:
            self._reset(layer_type)
            return rotate(hidden, position_ids, **named)
        assert sum(count for count, _ in self.spans) == position_ids.shape[-1], "rope_spans must cover the tokens"
        found, begin = [], 0
        for length, group in groupby(self.spans, key=lambda span: self._relevant_length(span[1], settings)):
            end = begin + sum(count for count, _ in group)
            self._reset(layer_type)
            # An extra token at the document's last position sets the length, and is dropped again.
            last = position_ids.new_full((len(position_ids), 1), length - 1)
            tables = rotate(hidden, torch.cat([position_ids[:, begin:end], last], dim=1), **named)
            found.append([table[:, :-1] for table in tables])
            begin = end
        return tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))

    def _relevant_length(self, length: int, settings: dict[str, Any]) -> int:
        """Return a representative length with the same frequencies, to group as many lengths as possible."""
        if settings["rope_type"] == "longrope":
            within = int(settings["original_max_position_embeddings"])
            return within + (length > within)
        original: Any = self.original_max_seq_len
        return max(length, int(original))

    def _reset(self, layer_type: str | None) -> None:
        """Reset frequencies: `dynamic` would keep those of the longest input so far."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        unscaled = getattr(self, f"{prefix}original_inv_freq")
        self.register_buffer(f"{prefix}inv_freq", unscaled, persistent=False)
        setattr(self, f"{prefix}max_seq_len_cached", self.original_max_seq_len)


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
        raise ConfigError(f"rope harpe: {num_bases} bases for {shape.num_kv_heads} KV heads; give one per head.")
    if len(by_layer) not in (1, num_layers):
        raise ConfigError(f"rope harpe: bases for {len(by_layer)} layers, and the model has {num_layers}.")
    device = next(model.parameters()).device
    backbone.rotary_emb = NoRotation(shape.rotary_dim, config)
    # One list if all layers are equal: shorter, and easier to check in the config.
    backbone.head_bases = (by_layer[0] if (by_layer == by_layer[0]).all() else by_layer).tolist()
    # Saved with the model, with a rope_type that plain classes refuse.
    config.head_bases = backbone.head_bases
    config.rope_parameters = config.rope_parameters | {"rope_type": ROPE_TYPE}
    for layer, of_layer in zip(backbone.layers, np.broadcast_to(by_layer, (num_layers, num_bases)), strict=True):
        inv_freq = torch.from_numpy(frequencies(of_layer, shape.rotary_dim)).to(device)
        layer.self_attn.register_buffer("head_inv_freq", inv_freq, persistent=False)


def _check_rotation(model: Any) -> None:
    """Refuse a model that rotates in another way: interleaved pairs of dimensions, or only some layers."""
    shape, layers = rope_shape(model.config), getattr(model.base_model, "layers", ())
    refusal = ConfigError(
        f"rope harpe: {type(model).__name__} does not rotate its heads as Llama does, "
        "which is not supported yet; use method abf."
    )
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise refusal
    if model.config._attn_implementation != OWN_ATTENTION:
        raise ConfigError(
            'rope harpe: a base per head needs attn_implementation="unspool"; load the model with unspool.load.'
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
    """Return a copy of a model's config without a base per head, for building the plain class."""
    plain = copy.deepcopy(config)
    if getattr(plain, "head_bases", None) is not None:
        del plain.head_bases
        plain.rope_parameters = plain.rope_parameters | {"rope_type": "default"}
    return plain


class NoRotation(nn.Module):
    """A rotary module with cos 1 and sin 0, because our attention rotates. Refuses any other attention."""

    def __init__(self, rotary_dim: int, config: Any) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim
        self._config = config

    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._config._attn_implementation != OWN_ATTENTION:
            raise ConfigError(
                f"HARPE: attention {self._config._attn_implementation!r} does not support a base per head; "
                f"use attn_implementation={OWN_ATTENTION!r}, or export the model and load it with "
                "trust_remote_code=True."
            )
        shape = (*position_ids.shape, self.rotary_dim)
        return hidden.new_ones(1).expand(shape), hidden.new_zeros(1).expand(shape)


def rotate_heads(query: Tensor, key: Tensor, inv_freq: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rotate every KV head and its query heads by the KV head's own frequencies, in fp32.

    If a model rotates only the first part of each head, `inv_freq` is shorter and the rest does not change. Without
    packing, keys are at 0, 1, 2, … and queries at `position_ids` [B, queries], or at the end. So cached unrotated keys
    get the right positions regardless of how the cache was filled, also for several texts in a batch.
    """
    return rotate_at(query, key, inv_freq, *positions_of(query, key, position_ids))


def positions_of(query: Tensor, key: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions [B or 1, S] of queries and of keys, in fp32."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_whole = num_queries == num_keys
    if is_whole and position_ids is not None:
        positions = position_ids[:, :num_keys].float()
    else:
        positions = torch.arange(num_keys, device=key.device, dtype=torch.float32)[None]
    if is_whole or position_ids is None:
        return positions[:, num_keys - num_queries :], positions
    return position_ids.float(), positions


def rotate_at(
    query: Tensor, key: Tensor, inv_freq: Tensor, query_positions: Tensor, key_positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the frequencies of their KV head at these positions."""
    cos, sin = _tables(inv_freq, key_positions)
    query_cos, query_sin = (table[:, :, None] for table in _tables(inv_freq, query_positions))
    num_queries, groups = query.shape[2], query.shape[1] // key.shape[1]
    # As [B, KV, groups, S, D], so that query heads share the tables instead of copying them.
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
