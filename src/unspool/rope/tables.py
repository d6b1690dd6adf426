"""RoPE settings in the format of `transformers`, their frequencies, and the base class of RoPE methods.

Configs are plain dicts, with v5's `rope_parameters` (also nested by layer type) or the older `rope_theta` and
`rope_scaling`. Frequencies are computed in float64 and rounded to float32 once, at the end. They equal those of
`transformers` up to its rounding. Unknown scalings are refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from unspool.core.config import Config, lookup
from unspool.core.errors import ConfigError

# Layer type with full attention in models with several layer types; only these layers are extended.
GLOBAL_LAYERS = "full_attention"
# Scalings whose settings include the original length.
STORES_ORIGINAL_LEN = ("yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeShape:
    """The values of a model's config that RoPE methods need."""

    rotary_dim: int
    num_kv_heads: int
    base: float
    original_len: int  # context length that `base` was trained for, without scaling
    max_positions: int  # max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class Tables:
    inv_freq: np.ndarray  # float32 [d/2]
    attention_factor: float = 1.0  # factor of cos and sin


def plain_frequencies(base: Any, dim: int) -> np.ndarray:
    """Return base^(−2i/d) for i < d/2, in float64."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    table: np.ndarray = base**-exponents
    return table


def frequencies(bases: np.ndarray, rotary_dim: int) -> np.ndarray:
    """Return float32 base^(−2i/d) for i < d/2, one row per base."""
    return plain_frequencies(np.asarray(bases, dtype=np.float64)[:, None], rotary_dim).astype(np.float32)


def format_base(number: float) -> str:
    """Format a base as in a recipe: 1e6, 8.8e6, 50000."""
    if number < 1e5:
        return f"{number:g}"
    digits, _, power = f"{number:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


# Reading a config


def is_nested(parameters: Mapping[str, Any]) -> bool:
    """Return whether each layer type has its own settings, as in Gemma 3."""
    return bool(parameters) and all(value is None or isinstance(value, Mapping) for value in parameters.values())


def global_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the v5 RoPE settings of the layers with full attention, from a config of any version."""
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
            "use a model with rotary positions, such as Llama, Qwen or Mistral."
        )
    if found["rope_type"] in STORES_ORIGINAL_LEN:
        # Phi-3 also stores this length outside the settings, and `transformers` prefers that value.
        outside = config.get("original_max_position_embeddings")
        inside = found.get("original_max_position_embeddings")
        found["original_max_position_embeddings"] = outside or inside or config["max_position_embeddings"]
    for name, least in (("rope_theta", 1), ("factor", 0), ("original_max_position_embeddings", 0)):
        value = found.get(name)
        if value is not None and not (isinstance(value, int | float) and least < value < math.inf):
            raise ConfigError(
                f"model_type {config.get('model_type')!r} has {name} {value!r} in its config; it must be a number "
                f"above {least}."
            )
    return {name: value for name, value in found.items() if value is not None}


def shape_of(config: Mapping[str, Any]) -> RopeShape:
    """Read the shape that RoPE methods need from a config; ConfigError for a model without RoPE."""
    parameters = global_parameters(config)
    heads = config["num_attention_heads"]
    if (config.get("max_position_embeddings") or 0) <= 0:
        raise ConfigError(
            f"model_type {config.get('model_type')!r}: its config has no max_position_embeddings, so the original "
            "context length is unknown; write it into the model's config.json."
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


def config_frequencies(config: Mapping[str, Any], seq_len: int) -> tuple[np.ndarray, str]:
    """Return the float64 frequencies [sets, d/2] of a config, one set per distinct base, and a short description."""
    rope, parameters = shape_of(config), global_parameters(config)
    if config.get("head_bases"):
        bases = np.unique(np.asarray(config["head_bases"], dtype=np.float64))
        summary = f"a base per head, {format_base(bases[0])} to {format_base(bases[-1])}"
        return frequencies(bases, rope.rotary_dim).astype(np.float64), summary
    found = tables(parameters, rope.rotary_dim, max_positions=rope.max_positions, seq_len=seq_len)
    if is_divided(parameters):
        return found.inv_freq[None].astype(np.float64), describe_divided(parameters)
    scaling = "" if parameters["rope_type"] == "default" else f", {parameters['rope_type']} scaling"
    return found.inv_freq[None].astype(np.float64), f"base {format_base(rope.base)}{scaling}"


def _original_len(parameters: Mapping[str, Any], max_positions: int) -> int:
    if parameters["rope_type"] in STORES_ORIGINAL_LEN:
        return int(parameters["original_max_position_embeddings"])
    # PI has no field for the original length; `dynamic` does not change max_position_embeddings.
    return round(max_positions / parameters["factor"]) if parameters["rope_type"] == "linear" else max_positions


def old_fields(parameters: Mapping[str, Any], max_positions: int) -> dict[str, Any] | None:
    """Return `rope_theta` and `rope_scaling` for versions before v5; None if they cannot express the settings."""
    if not is_nested(parameters):
        outside = {}
        if parameters["rope_type"] == "longrope":
            # Before v5, the original length is only read outside the settings, and `factor` is ignored.
            outside = {"original_max_position_embeddings": parameters["original_max_position_embeddings"]}
            parameters = {**parameters, "attention_factor": _longrope_attention(parameters, max_positions)}
        scaling = {
            key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")
        }
        # Before 4.43 the type was called `type`.
        scaling |= {"type": scaling["rope_type"]}
        partial = parameters.get("partial_rotary_factor")
        return {
            "rope_theta": parameters["rope_theta"],
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            **outside,
        } | ({} if partial is None else {"partial_rotary_factor": partial})
    local = parameters.get("sliding_attention")
    if set(parameters) != {GLOBAL_LAYERS, "sliding_attention"} or not local or local["rope_type"] != "default":
        return None
    fields = old_fields(parameters[GLOBAL_LAYERS], max_positions)
    return None if fields is None else fields | {"rope_local_base_freq": local["rope_theta"]}


# Frequencies


def tables(parameters: Mapping[str, Any], rotary_dim: int, *, max_positions: int, seq_len: int | None = None) -> Tables:
    """Return the tables of a rotary module; `seq_len` matters only to scalings that depend on the input length."""
    scale = lookup(SCALINGS, parameters["rope_type"], kind="rope_type")
    inv_freq, attention_factor = scale(parameters, rotary_dim, max_positions, seq_len)
    return Tables(inv_freq=inv_freq.astype(np.float32), attention_factor=attention_factor)


Scaling = Callable[[Mapping[str, Any], int, int, int | None], tuple[np.ndarray, float]]


def _default(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    return plain_frequencies(float(p["rope_theta"]), dim), 1.0


def _linear(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    return plain_frequencies(float(p["rope_theta"]), dim) / p["factor"], 1.0


def _dynamic(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    stretch = p["factor"] * max(seq_len or 0, max_positions) / max_positions - (p["factor"] - 1)
    return plain_frequencies(float(ntk_base(float(p["rope_theta"]), stretch, dim)), dim), 1.0


def ntk_base(base: float, stretch: float, dim: int) -> float:
    """Return the base at which the slowest dimension rotates `stretch` times slower."""
    return float(base * stretch ** (dim / (dim - 2)))


def _yarn(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    base, factor = float(p["rope_theta"]), p["factor"]
    own = plain_frequencies(base, dim)

    def dimension(turns: float) -> float:
        """Return the index of the dimension with this many rotations over the original length."""
        original = p["original_max_position_embeddings"]
        return float(dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)))

    first, last = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # Linear in the dimension's index, as in `transformers`; the paper's ramp is linear in the number of rotations.
    ramp = np.clip((np.arange(len(own)) - first) / ((last - first) or 0.001), 0, 1)
    attention = p.get("attention_factor")
    if attention is None:
        mscale, all_dim = p.get("mscale"), p.get("mscale_all_dim")
        attention = _temperature(factor, mscale) / _temperature(factor, all_dim) if mscale and all_dim else None
    return own * (1 - ramp) + own / factor * ramp, _temperature(factor) if attention is None else float(attention)


def _temperature(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    is_long = seq_len and seq_len > p["original_max_position_embeddings"]
    factors = p["long_factor"] if is_long else p["short_factor"]
    if len(factors) != dim // 2:
        raise ConfigError(f"longrope: {len(factors)} factors for {dim // 2} frequencies; give one each.")
    inv_freq = plain_frequencies(float(p["rope_theta"]), dim) / np.asarray(factors, dtype=np.float64)
    return inv_freq, _longrope_attention(p, max_positions)


def _longrope_attention(p: Mapping[str, Any], max_positions: int) -> float:
    original = p["original_max_position_embeddings"]
    factor = p.get("factor") or max_positions / original
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(p: Mapping[str, Any], dim: int, max_positions: int, seq_len: int | None) -> tuple[np.ndarray, float]:
    own = plain_frequencies(float(p["rope_theta"]), dim)
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


# RoPE methods


@dataclass(frozen=True, kw_only=True)
class RopeSettings:
    """The RoPE settings of one model at one context length: either `parameters` or `head_bases` is given."""

    max_positions: int  # value for max_position_embeddings
    parameters: dict[str, Any] | None = None  # `rope_parameters` of transformers v5, if they can express the method
    head_bases: np.ndarray | None = None  # one base per KV head
    rotate_by_layer: bool = False  # each layer shifts the bases by one head
    self_extend: tuple[int, int] | None = None  # window and group of Self-Extend, which needs `head_bases`

    def tables(self, rope: RopeShape, seq_len: int | None = None) -> Tables:
        """Return frequencies [d/2], or [KV heads, d/2] if heads differ."""
        if self.head_bases is not None:
            return Tables(inv_freq=frequencies(self.head_bases, rope.rotary_dim))
        assert self.parameters is not None
        return tables(self.parameters, rope.rotary_dim, max_positions=self.max_positions, seq_len=seq_len)

    def summary(self, rope: RopeShape, context_len: int) -> str:
        """Describe the settings in a few words, such as `factor 8, temperature 1.21`."""
        if self.head_bases is not None:
            return f"bases {format_base(self.head_bases[0])} to {format_base(self.head_bases[-1])}"
        assert self.parameters is not None
        if self.parameters["rope_type"] == "default":
            return f"base {format_base(self.parameters['rope_theta'])}"
        if is_divided(self.parameters):
            return describe_divided(self.parameters)
        attention_factor = self.tables(rope, context_len).attention_factor
        temperature = f", temperature {attention_factor:.3g}" if attention_factor != 1 else ""
        return f"factor {self.parameters['factor']:g}{temperature}"


def one_base(base: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(base)}


# Divisor of a frequency that must not rotate: JSON has no infinity. Even at position 1e9 the angle is at most 1e-11, so
# in fp32 its cosine is 1, and its sine is too small to change a sum. Times any base up to 1e16, it is finite in fp32.
FROZEN = 1e20


def divided(base: float, divisors: Sequence[float], max_positions: int) -> dict[str, Any]:
    """Return `rope_parameters` that divide every frequency by its own number, at every input length.

    `longrope` with two equal lists. Both lengths are equal, so readers that compute the attention factor from their
    ratio get 1 too.
    """
    return {
        "rope_type": "longrope",
        "rope_theta": float(base),
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        "original_max_position_embeddings": max_positions,
    }


def is_divided(parameters: Mapping[str, Any]) -> bool:
    """Return whether settings are like those of `divided`: the same frequencies for every input length."""
    if parameters["rope_type"] != "longrope" or parameters.get("attention_factor") != 1:
        return False
    return bool(parameters["short_factor"] == parameters["long_factor"])


def describe_divided(parameters: Mapping[str, Any]) -> str:
    divisors = parameters["short_factor"]
    if min(divisors) >= FROZEN:
        return "no rotation"
    lowered = sum(each > 1 for each in divisors)
    return f"base {format_base(parameters['rope_theta'])}, {lowered} of {len(divisors)} frequencies lowered"


Gain = Annotated[float, Field(gt=0)]


class RopeMethod(Config):
    """Base class of RoPE methods. Factors are relative to the length that the model's unscaled base was trained for.

    So a later stage replaces an earlier scaling instead of adding to it. To add a method, write a subclass whose
    `method` is a `Literal`, and add it to `ROPE_METHODS` in methods.py or call `register_rope_method`.
    """

    method: str = Field(description="Name of the RoPE method.")
    attention_scale: Gain | tuple[Gain, ...] | None = Field(
        default=None,
        description="Gain of the attention scores, folded into the query weights of the model that the stage starts "
        "from. One number for all layers with full attention, or one per layer. Default: none.",
    )

    # Whether the model keeps its frequencies; such a method has no `resolve`.
    keeps_frequencies: ClassVar[bool] = False
    # Whether inference engines compute the frequencies from max_position_embeddings.
    uses_max_positions: ClassVar[bool] = False
    # Whether a stage may train with the method, and a folder may store it.
    trainable: ClassVar[bool] = True
    # Whether applying the method runs the model, which needs whole weights.
    needs_weights: ClassVar[bool] = False
    # Settings that a recipe must give, if `suggest` cannot.
    requirement: ClassVar[str | None] = None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return (each for each in super().__repr_args__() if each != ("attention_scale", None))

    @model_serializer(mode="wrap")
    def _without_unset_scale(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `attention_scale` where it is not set, so that recorded settings of older runs still match."""
        plain: dict[str, Any] = dump(self)
        return {key: value for key, value in plain.items() if key != "attention_scale" or value is not None}

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        """Return the settings for a model at a context length; ConfigError if they contradict each other."""
        raise NotImplementedError

    def describe(self, rope: RopeShape) -> str:
        """Return the method's name with its main setting."""
        return self.method

    @classmethod
    def suggest(cls, rope: RopeShape, context_len: int, base: float) -> Self | None:
        """Return this method with settings for a model; None if there are none. `base` is a good single base."""
        return None
