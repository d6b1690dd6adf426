# Copyright The Unspool Authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A causal language model of `transformers` with a RoPE base per attention head (HARPE).

This file is copied into the folder of an exported model. It needs only torch and transformers (5.17 or later):

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

config.json has `plain_type` (the architecture, such as llama) and `head_bases` (a base per key/value head: one list for
all layers, or a list for each layer). The model has that architecture's own class with other rotations: every head is
rotated by its own base, in float32, before its keys are cached. So caches, masks, padding, position_ids and attention
kernels work as in the plain architecture. A query head uses the base of its key/value head. Saving the model writes
this file too.
"""

import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

MODEL_TYPE = "unspool_harpe"
# The `rope_type` of saved configs and of configs in memory. No version of `transformers` knows it, so a plain class
# raises a KeyError with this text instead of computing other positions.
ROPE_TYPE = "a base per head (HARPE): load it with trust_remote_code=True, or with unspool"


class HarpeConfig(PreTrainedConfig):  # type: ignore[misc]
    """Factory in `auto_map`: creates the plain architecture's config with `head_bases` and `plain_type`."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        kept = {key: value for key, value in config_dict.items() if key not in ("model_type", "rope_scaling")}
        kept["rope_parameters"] = dict(config_dict["rope_parameters"], rope_type="default")
        return config_class(config_dict["plain_type"]).from_dict(kept, **kwargs)


class HarpeForCausalLM(PreTrainedModel):  # type: ignore[misc]
    """Factory in `auto_map`: creates a model of the plain architecture's class with a base per head."""

    config_class = HarpeConfig

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        config = config or HarpeConfig.from_pretrained(name)
        return model_class(config.plain_type).from_pretrained(name, *args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return model_class(config.plain_type)._from_config(config, **kwargs)


class _SavedAsHarpe:
    """Mixin of config classes: the saved config names this file, so it is never loaded as the plain architecture."""

    def to_dict(self) -> dict[str, Any]:
        names = {"AutoConfig": HarpeConfig, "AutoModelForCausalLM": HarpeForCausalLM}
        auto_map = {name: f"{Path(__file__).stem}.{made.__name__}" for name, made in names.items()}
        own = {"model_type": MODEL_TYPE, "architectures": [HarpeForCausalLM.__name__], "auto_map": auto_map}
        plain: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        # `rope_scaling` is for transformers before v5.
        rope = dict(plain["rope_parameters"], rope_type=ROPE_TYPE)
        return plain | own | {"rope_parameters": rope, "rope_scaling": rope}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        done = super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        target = Path(save_directory) / Path(__file__).name
        if target.resolve() != Path(__file__).resolve():
            shutil.copyfile(__file__, target)
        return done


class _HeadBases:
    """Mixin of model classes: builds the plain model, then applies the bases."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config.rope_parameters = dict(config.rope_parameters, rope_type="default")
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        apply_head_bases(self, config)
        config.rope_parameters = dict(config.rope_parameters, rope_type=ROPE_TYPE)


@lru_cache
def config_class(plain_type: str) -> Any:
    # In memory the model_type is the plain one, because `transformers` reads it in many places.
    return type(HarpeConfig.__name__, (_SavedAsHarpe, CONFIG_MAPPING[plain_type]), {"__module__": __name__})


@lru_cache
def model_class(plain_type: str) -> Any:
    plain = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[plain_type]]
    own = {"config_class": config_class(plain_type), "__module__": __name__}
    return type(HarpeForCausalLM.__name__, (_HeadBases, plain), own)


def apply_head_bases(model: Any, config: Any) -> None:
    """Make every attention layer of `model` rotate its heads by the bases in `config`."""
    backbone = model.base_model
    num_layers, num_kv_heads = len(backbone.layers), getattr(config, "num_key_value_heads", None)
    bases = config.head_bases
    by_layer = bases if isinstance(bases[0], list) else [bases] * num_layers
    counts = {len(of_layer) for of_layer in by_layer}
    if len(by_layer) != num_layers or counts != {num_kv_heads or config.num_attention_heads}:
        raise ValueError("head_bases in config.json must hold a base per key/value head, or one such list per layer.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = config.rope_parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    rotary_dim = int(head_dim * (partial or 1.0))
    backbone.rotary_emb = PassPositions()
    for layer, of_layer in zip(backbone.layers, by_layer, strict=True):
        _take_angles(sys.modules[type(layer.self_attn).__module__])
        layer.self_attn.head_angles = HeadAngles(of_layer, rotary_dim)
        layer.self_attn.register_forward_pre_hook(_before_attention, with_kwargs=True)


class PassPositions(nn.Module):
    """Replaces the model's rotary module: returns the positions, because angles differ from layer to layer."""

    def forward(self, hidden: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return position_ids, None


class HeadAngles(nn.Module):
    """Positions [B, S] to angles [B, KV, S, d/2], in float32."""

    def __init__(self, bases: list[float], rotary_dim: int) -> None:
        super().__init__()
        self.bases = bases
        self.rotary_dim = rotary_dim
        # Not a buffer: `model.to(torch.bfloat16)` would round it, and loading would leave it uninitialized.
        self.inv_freq: Tensor | None = None

    def forward(self, positions: Tensor) -> Tensor:
        if self.inv_freq is None or self.inv_freq.device != positions.device:
            exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu") / self.rotary_dim
            bases = torch.tensor(self.bases, dtype=torch.float64, device="cpu")
            self.inv_freq = (bases[:, None] ** -exponents).float().to(positions.device)
        return positions[:, None, :, None].float() * self.inv_freq[:, None, :]


def _before_attention(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the positions from `PassPositions` by this layer's angles and the function that applies them."""
    positions, nothing = kwargs.get("position_embeddings") or (None, None)
    if positions is None or nothing is not None:
        raise RuntimeError("This version of transformers passes positions to attention in an unknown way; try another.")
    return args, kwargs | {"position_embeddings": (attention.head_angles(positions), rotate)}


def _take_angles(modeling: Any) -> None:
    """Make `apply_rotary_pos_emb` of a modeling file also accept (angles, function) in place of (cos, sin).

    Calls with cos and sin, by other models of that file, behave as before.
    """
    plain = modeling.apply_rotary_pos_emb
    if hasattr(plain, "plain"):
        return

    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if not callable(args[-1]):
            return plain(*args, **kwargs)
        *heads, angles, rotate = args
        rotated = tuple(rotate(head, angles, head_dim=kwargs.get("unsqueeze_dim", 1)) for head in heads)
        return rotated if len(rotated) > 1 else rotated[0]

    apply_rotary_pos_emb.plain = plain  # type: ignore[attr-defined]
    modeling.apply_rotary_pos_emb = apply_rotary_pos_emb


def rotate(heads: Tensor, angles: Tensor, *, head_dim: int) -> Tensor:
    """Rotate heads by the angles [B, KV, S, d/2] of their KV heads; `head_dim` is the dimension that counts heads."""
    if head_dim == 2:
        angles = angles.transpose(1, 2)
    # Query heads that share a KV head are adjacent.
    shape = heads.shape
    grouped = heads.reshape(*shape[:head_dim], angles.shape[head_dim], -1, *shape[head_dim + 1 :])
    cos, sin = angles.cos().unsqueeze(head_dim + 1), angles.sin().unsqueeze(head_dim + 1)
    half = angles.shape[-1]
    first, second, rest = grouped[..., :half].float(), grouped[..., half : 2 * half].float(), grouped[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return torch.cat((rotated, rest), dim=-1).reshape(shape)
