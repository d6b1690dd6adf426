"""Models, and devices, that can train with FP8 products."""

from typing import Any

import torch
from torch import nn

from unspool.core.errors import ConfigError
from unspool.models.checks import layers_of
from unspool.models.fp8.operands import MULTIPLE

# Linear layers of attention and MLP; those in one tuple share their input.
ATTENTION = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
MLP = (("gate_proj", "up_proj"), ("down_proj",))
FIRST_CAPABILITY = (8, 9)  # Ada
INSTEAD = "set precision to bf16"


def shared_inputs(layer: Any) -> list[tuple[nn.Linear, ...]]:
    """Return the linear layers of a decoder layer, in tuples with the same input."""
    parts = (layer.self_attn, ATTENTION), (layer.mlp, MLP)
    return [tuple(getattr(part, name) for name in names) for part, groups in parts for names in groups]


def refuse_model(model: Any, bf16_layers: int) -> None:
    """Raise ConfigError if FP8 does not fit the model, also one without weights, or the device of its weights."""
    layers = layers_of(model)
    if 2 * bf16_layers >= len(layers):
        raise ConfigError(
            f"bf16_layers={bf16_layers} at either end leaves none of the model's {len(layers)} layers for precision "
            f"fp8; use at most {(len(layers) - 1) // 2}."
        )
    for number, layer in enumerate(layers[bf16_layers : len(layers) - bf16_layers], start=bf16_layers):
        problem = _layer_problem(layer)
        if problem is not None:
            raise ConfigError(f"precision fp8: layer {number} of {type(model).__name__} {problem}; {INSTEAD}.")
    refuse_device(next(layers[0].parameters()).device)


def _layer_problem(layer: nn.Module) -> str | None:
    for part, groups in (("self_attn", ATTENTION), ("mlp", MLP)):
        for name in (name for names in groups for name in names):
            linear = getattr(getattr(layer, part, None), name, None)
            if not isinstance(linear, nn.Linear):
                return f"has no linear layer {part}.{name} (models with experts are not supported)"
            if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
                shape = f"{linear.in_features} × {linear.out_features}"
                return f"has {part}.{name} of {shape}, and FP8 products need multiples of {MULTIPLE}"
    return None


def refuse_device(device: torch.device) -> None:
    """Raise ConfigError if `device` does not multiply in FP8. A CPU does, slowly."""
    if device.type in ("cpu", "meta"):
        return
    if device.type != "cuda":
        raise ConfigError(f"precision fp8 needs an NVIDIA GPU or a CPU, not {device.type}; {INSTEAD}.")
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"precision fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), and {name} has "
            f"{capability[0]}.{capability[1]}; {INSTEAD}."
        )
