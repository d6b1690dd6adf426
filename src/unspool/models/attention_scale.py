"""Multiply the attention scores of each layer by a gain, folded into the weights of its queries.

Scores are linear in the queries, so a folded gain needs no config field, and every engine computes it. A layer that
normalizes its queries has the gain in the weights of that norm. On the first layer, a folded gain is compared with the
same gain of the layer's own scale before any weight changes for good.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unspool.core.errors import ConfigError
from unspool.models.checks import DOC_LEN, attention_of, last_states, layers_of
from unspool.rope.tables import GLOBAL_LAYERS

# A power of two, so that folding it rounds nothing.
PROBE = 4.0
# Relative to what the gain changes: a gain that is lost differs by 1, and rounding to bf16 by a few percent.
TOLERANCE = 0.2


def scale_attention(model: Any, gain: float | Sequence[float]) -> None:
    """Multiply the attention scores by `gain`, in place: of layers with full attention, or by one number per layer.

    ConfigError for a model whose queries cannot be scaled by weights; its weights are unchanged then.
    """
    gains = _by_layer(model, gain)
    scaled = [(attention_of(layer), each) for layer, each in zip(layers_of(model), gains, strict=True) if each != 1]
    if not scaled:
        return
    _check_folding(model, scaled[0][0])
    for attention, each in scaled:
        fold_gain(model, attention, each)


def _by_layer(model: Any, gain: float | Sequence[float]) -> list[float]:
    layers = layers_of(model)
    if isinstance(gain, Sequence):
        if len(gain) != len(layers):
            raise ConfigError(
                f"attention_scale holds {len(gain)} gains, but the model has {len(layers)} layers; give one per layer, "
                "or a single number."
            )
        return list(gain)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [GLOBAL_LAYERS] * len(layers)
    if GLOBAL_LAYERS not in kinds:
        return [gain] * len(layers)
    return [gain if kind == GLOBAL_LAYERS else 1.0 for kind in kinds]


def _check_folding(model: Any, attention: Any) -> None:
    """Refuse a model in which a folded gain differs from a gain of the layer's `scaling`."""
    if not isinstance(getattr(attention, "scaling", None), float):
        raise _refusal(model)
    before = [(tensor, tensor.clone()) for tensor, _ in _query_weights(model, attention)]
    plain = _output(model, attention)
    attention.scaling *= PROBE
    wanted = _output(model, attention)
    attention.scaling /= PROBE
    fold_gain(model, attention, PROBE)
    found = _output(model, attention)
    for tensor, own in before:
        tensor.copy_(own)
    if float((found - wanted).norm()) > TOLERANCE * float((wanted - plain).norm()):
        raise _refusal(model)


def _output(model: Any, attention: Any) -> Tensor:
    """Return what one attention module computes for a test document, in fp32."""
    outputs: list[Tensor] = []
    hook = attention.register_forward_hook(lambda module, args, out: outputs.append(out[0].float()))
    try:
        last_states(model, (DOC_LEN,))
    finally:
        hook.remove()
    return outputs[0]


@torch.no_grad()
def fold_gain(model: Any, attention: Any, gain: float) -> None:
    """Multiply the queries of one attention module by `gain`."""
    for tensor, offset in _query_weights(model, attention):
        tensor.copy_((tensor.double() + offset) * gain - offset)


def _query_weights(model: Any, attention: Any) -> list[tuple[Tensor, float]]:
    """Return the tensors that queries are linear in, each with a number that the model adds to it (1 in Gemma)."""
    norm, projection, fused = (getattr(attention, name, None) for name in ("q_norm", "q_proj", "qkv_proj"))
    if norm is not None:
        weight = getattr(norm, "weight", None)
        if weight is None or getattr(norm, "bias", None) is not None:
            raise _refusal(model)
        return [(weight.data, _norm_offset(norm))]
    if isinstance(projection, nn.Linear):
        return [(parameter.data, 0.0) for parameter in projection.parameters(recurse=False)]
    if isinstance(fused, nn.Linear):
        num_rows = model.config.num_attention_heads * attention.head_dim
        return [(parameter.data[:num_rows], 0.0) for parameter in fused.parameters(recurse=False)]
    raise _refusal(model)


@torch.no_grad()
def _norm_offset(norm: nn.Module) -> float:
    """Return what a norm adds to its weight: 1 if it scales by 1 + weight, as in Gemma, else 0."""
    weight: Any = norm.weight
    own = weight.clone()
    weight.zero_()
    try:
        scales = bool(norm(torch.ones_like(own)).any())
    finally:
        weight.copy_(own)
    return float(scales)


def _refusal(model: Any) -> ConfigError:
    return ConfigError(
        f"attention_scale: {type(model).__name__} computes its queries in a way that no gain of the weights scales "
        "exactly; remove attention_scale, or use a model such as Llama, Qwen or Mistral."
    )
