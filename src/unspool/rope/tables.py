"""RoPE settings as `transformers` spells them, and the frequencies they mean.

In: a config as a plain dict, v5's `rope_parameters` (also nested by layer type) or the older `rope_theta` and
`rope_scaling`. Out: `RopeShape`, what position methods need to know; `Tables`, what a rotary module computes with.
Promise: frequencies are computed in float64 and rounded to float32 once, at the end; they equal those of
`transformers` up to its own rounding. A scaling that we do not know is refused, never guessed.
Elsewhere: making such settings (scaling.py), giving them to a model (model/rotary.py).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.core.config import lookup
from unspool.core.errors import ConfigError

# The layers that see the whole context, where a model has several kinds: only these are extended.
GLOBAL_LAYERS = "full_attention"
# Scalings that name the length from which they extend.
NAMES_ORIGINAL = ("yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """What a position method needs to know of a model."""

    rotary_dim: int
    num_kv_heads: int
    base: float
    original_len: int  # the context that `base` without any scaling was trained for
    max_positions: int  # the context that the model claims now


@dataclass(frozen=True, kw_only=True)
class Tables:
    inv_freq: np.ndarray  # float32 [d/2]
    attention_factor: float = 1.0  # cos and sin are multiplied by it


def frequencies(bases: np.ndarray, rotary_dim: int) -> np.ndarray:
    """base^(−2i/d) for i < d/2, one line per base."""
    return _powers(np.asarray(bases, dtype=np.float64)[:, None], rotary_dim).astype(np.float32)


# Reading a config


def is_nested(parameters: Mapping[str, Any]) -> bool:
    """Whether each kind of layer has its own settings, as in Gemma 3."""
    return bool(parameters) and all(value is None or isinstance(value, Mapping) for value in parameters.values())


def global_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the layers that see the whole context, in v5's spelling, from a config of any age."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict((found.get(GLOBAL_LAYERS) or {}) if is_nested(found) else found)
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    found.pop("type", None)
    for name in ("rope_theta", "partial_rotary_factor"):
        if found.get(name) is None:
            found[name] = config.get(name)
    if found["rope_theta"] is None:
        raise ConfigError(
            f"model_type {config.get('model_type')!r} has no RoPE base in its config; "
            "use a model whose positions are rotary, such as Llama, Qwen or Mistral."
        )
    if found["rope_type"] in NAMES_ORIGINAL:
        # Phi-3 keeps this length beside the settings, and `transformers` then prefers that place.
        outside = config.get("original_max_position_embeddings")
        inside = found.get("original_max_position_embeddings")
        found["original_max_position_embeddings"] = outside or inside or config["max_position_embeddings"]
    return {name: value for name, value in found.items() if value is not None}


def shape_of(config: Mapping[str, Any]) -> RopeShape:
    """What position methods need to know, from a config; refuses a model without RoPE."""
    parameters = global_parameters(config)
    heads = config["num_attention_heads"]
    if not config.get("max_position_embeddings"):
        raise ConfigError(
            f"model_type {config.get('model_type')!r} gives no max_position_embeddings, so its original context "
            "is not known; write it into the model's config.json."
        )
    return RopeShape(
        rotary_dim=rotary_dim(config, parameters),
        num_kv_heads=config.get("num_key_value_heads") or heads,
        base=float(parameters["rope_theta"]),
        original_len=_original_len(parameters, config["max_position_embeddings"]),
        max_positions=int(config["max_position_embeddings"]),
    )


def rotary_dim(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def _original_len(parameters: Mapping[str, Any], max_positions: int) -> int:
    if parameters["rope_type"] in NAMES_ORIGINAL:
        return int(parameters["original_max_position_embeddings"])
    # PI has no field for it; `dynamic` leaves max_position_embeddings as it was.
    return round(max_positions / parameters["factor"]) if parameters["rope_type"] == "linear" else max_positions


def old_fields(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_theta` and `rope_scaling` as readers before v5 want them; None where these cannot say the same."""
    if not is_nested(parameters):
        scaling = {
            key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
        # Before 4.43 the type was called `type`.
        scaling |= {"type": scaling["rope_type"]}
        partial = parameters.get("partial_rotary_factor")
        return {
            "rope_theta": parameters["rope_theta"],
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        } | ({} if partial is None else {"partial_rotary_factor": partial})
    local = parameters.get("sliding_attention")
    if set(parameters) != {GLOBAL_LAYERS, "sliding_attention"} or not local or local["rope_type"] != "default":
        return None
    fields = old_fields(parameters[GLOBAL_LAYERS])
    return None if fields is None else fields | {"rope_local_base_freq": local["rope_theta"]}


# Frequencies


def tables(parameters: Mapping[str, Any], rotary_dim: int, *, max_positions: int, seq_len: int | None = None) -> Tables:
    """What a rotary module computes with; `seq_len` counts for scalings that follow the length of the input."""
    scale = lookup(SCALINGS, parameters["rope_type"], kind="rope_type")
    inv_freq, attention_factor = scale(parameters, rotary_dim, max_positions, seq_len)
    return Tables(inv_freq=inv_freq.astype(np.float32), attention_factor=attention_factor)


Scaling = Callable[[Mapping[str, Any], int, int, int | None], tuple[np.ndarray, float]]


def _powers(base: Any, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    table: np.ndarray = base**-exponents
    return table


def _default(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    return _powers(float(p["rope_theta"]), dim), 1.0


def _linear(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    return _powers(float(p["rope_theta"]), dim) / p["factor"], 1.0


def _dynamic(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    stretch = p["factor"] * max(seq_len or 0, max_positions) / max_positions - (p["factor"] - 1)
    return _powers(float(ntk_base(float(p["rope_theta"]), stretch, dim)), dim), 1.0


def ntk_base(base: float, stretch: float, dim: int) -> float:
    """The base under which the slowest dimension turns `stretch` times slower."""
    return float(base * stretch ** (dim / (dim - 2)))


def _yarn(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    base, factor = float(p["rope_theta"]), p["factor"]
    own = _powers(base, dim)

    def dimension(turns: float) -> float:
        """Where a dimension would turn so often over the original length."""
        original = p["original_max_position_embeddings"]
        return float(dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)))

    first, last = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # Linear in the dimension's index, as `transformers` has it; the paper's is linear in the number of turns.
    ramp = np.clip((np.arange(len(own)) - first) / ((last - first) or 0.001), 0, 1)
    attention = p.get("attention_factor")
    if attention is None:
        mscale, all_dim = p.get("mscale"), p.get("mscale_all_dim")
        attention = _temperature(factor, mscale) / _temperature(factor, all_dim) if mscale and all_dim else None
    return own * (1 - ramp) + own / factor * ramp, _temperature(factor) if attention is None else float(attention)


def _temperature(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_positions / original
    attention = p.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = p["long_factor"] if seq_len and seq_len > original else p["short_factor"]
    return _powers(float(p["rope_theta"]), dim) / np.asarray(factors, dtype=np.float64), float(attention)


def _llama3(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    own = _powers(float(p["rope_theta"]), dim)
    turns = p["original_max_position_embeddings"] * own / (2 * math.pi)
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return own * (keep + (1 - keep) / p["factor"]), 1.0


SCALINGS: dict[str, Scaling] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


# What a position method comes to for one model and one context.


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """Either `parameters` or `head_bases` is given."""

    max_positions: int  # max_position_embeddings to write
    parameters: dict[str, Any] | None = None  # `rope_parameters` of transformers v5; None: it cannot express this
    head_bases: np.ndarray | None = None  # one per KV head
    rotate_by_layer: bool = False

    def tables(self, rope: RopeShape, seq_len: int | None = None) -> Tables:
        """Frequencies [d/2], or [KV heads, d/2] where heads differ."""
        if self.head_bases is not None:
            return Tables(inv_freq=frequencies(self.head_bases, rope.rotary_dim))
        assert self.parameters is not None
        return tables(self.parameters, rope.rotary_dim, max_positions=self.max_positions, seq_len=seq_len)


def one_base(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(base)}
