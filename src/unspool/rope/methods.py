"""The RoPE methods of a recipe, one class each, and their registry."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from unspool.core.config import FromRegistry, register, tag_value
from unspool.core.errors import ConfigError
from unspool.core.sizes import Size, format_size
from unspool.rope.cope import CoPE
from unspool.rope.drope import DroPE
from unspool.rope.harpe import HARPE
from unspool.rope.tables import RopeMethod, RopeSettings, RopeShape, format_base, ntk_base, one_base


class Unchanged(RopeMethod):
    """No change of positions: continued training (CT), or training from scratch."""

    method: Literal["unchanged"] = "unchanged"
    keeps_frequencies: ClassVar[bool] = True

    def describe(self, rope: RopeShape) -> str:
        return f"the model's own base {format_base(rope.base)}"


class ABF(RopeMethod):
    """Adjusted base frequency: one larger base for every head (Xiong et al.; ProLong).

    Example:
        >>> import unspool
        >>> unspool.ABF(base=8e6)
        ABF(method='abf', base=8000000.0)
    """

    method: Literal["abf"] = "abf"
    base: float = Field(gt=1, description="The new RoPE base, such as 8e6.")

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        return RopeSettings(parameters=one_base(self.base), max_positions=max(context_len, rope.max_positions))

    def describe(self, rope: RopeShape) -> str:
        return f"{self.method} with base {format_base(self.base)}"

    @classmethod
    def suggest(cls, rope: RopeShape, context_len: int, base: float) -> Self | None:
        return cls(method="abf", base=base)


class Factor(RopeMethod):
    """A method that stretches the original length by a factor."""

    factor: float | None = Field(
        default=None,
        ge=1,
        description="Factor by which the original context length is stretched. Default: new context length ÷ "
        "`original`.",
    )
    original: Size | None = Field(
        default=None,
        description="Context length that the factor multiplies. Default: the length that the model's unscaled RoPE "
        "base was trained for.",
    )

    def original_len(self, rope: RopeShape) -> int:
        return self.original or rope.original_len

    def stretch(self, rope: RopeShape, context_len: int) -> float:
        """Return the factor; ConfigError if the context is shorter than the original length."""
        original = self.original_len(rope)
        if self.factor is None and context_len < original:
            raise ConfigError(
                f"rope {self.method}: context {format_size(context_len)} is shorter than the model's original "
                f"{format_size(original)}, so there is nothing to extend; use method unchanged, or give factor."
            )
        return self.factor or context_len / original

    def reaching(self, rope: RopeShape, context_len: int) -> float:
        """Return the factor; ConfigError if the original length times the factor is less than the context length."""
        factor, original = self.stretch(rope, context_len), self.original_len(rope)
        if round(factor * original) < context_len:
            raise ConfigError(
                f"rope {self.method}: factor {factor:g} × original {format_size(original)} is only "
                f"{format_size(round(factor * original))}, and the context is {format_size(context_len)}; "
                f"give factor {context_len / original:g} or leave it out."
            )
        return factor

    @classmethod
    def suggest(cls, rope: RopeShape, context_len: int, base: float) -> Self | None:
        return cls.model_validate({"method": method_name(cls)})


def scaled(
    rope_type: str, rope: RopeShape, factor: float, original_len: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return `rope_parameters` of a scaling, without those that are None."""
    parameters = {"rope_type": rope_type, "factor": factor, "rope_theta": rope.base, **more}
    parameters["original_max_position_embeddings"] = original_len
    return {name: value for name, value in parameters.items() if value is not None}


class NTK(Factor):
    """NTK-aware: a base that slows the slowest dimension by the factor and does not change the fastest.

    Example:
        >>> import unspool
        >>> unspool.NTK(factor=4).factor
        4.0
    """

    method: Literal["ntk"] = "ntk"

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        factor = self.reaching(rope, context_len)
        return RopeSettings(
            parameters=one_base(ntk_base(rope.base, factor, rope.rotary_dim)),
            max_positions=max(context_len, round(factor * self.original_len(rope))),
        )


class PI(Factor):
    """Position interpolation: all dimensions are slowed by the factor (Chen et al.).

    Example:
        >>> import unspool
        >>> unspool.PI().factor is None  # the new context ÷ the original one
        True
    """

    method: Literal["pi"] = "pi"
    uses_max_positions: ClassVar[bool] = True

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        factor = self.reaching(rope, context_len)
        return RopeSettings(
            parameters=scaled("linear", rope, factor),
            # Exact, because the original length is computed from both values when it is read back.
            max_positions=round(factor * self.original_len(rope)),
        )


class Dynamic(Factor):
    """Dynamic NTK: a base that grows with the input length, beyond the original length only."""

    method: Literal["dynamic"] = "dynamic"
    uses_max_positions: ClassVar[bool] = True

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        return RopeSettings(
            parameters=scaled("dynamic", rope, self.stretch(rope, context_len)),
            # `transformers` reads the original length from max_position_embeddings, which must not change.
            max_positions=self.original_len(rope),
        )


class NTKByParts(Factor):
    """NTK-by-parts: keeps fast dimensions, interpolates slow ones, blends those between; no temperature."""

    method: Literal["ntk-by-parts"] = "ntk-by-parts"
    uses_max_positions: ClassVar[bool] = True
    beta_fast: float = Field(
        default=32,
        gt=0,
        description="Dimensions with more rotations than this over the original length keep their frequency.",
    )
    beta_slow: float = Field(
        default=1,
        gt=0,
        description="Dimensions with fewer rotations than this over the original length are fully interpolated.",
    )
    truncate: bool = Field(
        default=True, description="Round the borders of the partly interpolated range outward to whole dimensions."
    )

    @model_validator(mode="after")
    def _between(self) -> "NTKByParts":
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow:g} must be below beta_fast {self.beta_fast:g}")
        return self

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        return self.by_parts(rope, context_len, attention_factor=1.0)

    def by_parts(self, rope: RopeShape, context_len: int, *, attention_factor: float | None) -> RopeSettings:
        factor, original = self.reaching(rope, context_len), self.original_len(rope)
        betas = {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        parameters = scaled("yarn", rope, factor, original, attention_factor=attention_factor, **betas)
        if not self.truncate:
            parameters["truncate"] = False
        # Exact: some versions of `transformers` compute the factor from both lengths, and vLLM computes the context.
        return RopeSettings(parameters=parameters, max_positions=round(factor * original))


class YaRN(NTKByParts):
    """YaRN: NTK-by-parts, with cos and sin multiplied by 0.1·ln(factor) + 1 (Peng et al.).

    Example:
        >>> import unspool
        >>> unspool.YaRN(factor=8).beta_fast
        32
    """

    method: Literal["yarn"] = "yarn"  # type: ignore[assignment]
    attention_factor: float | None = Field(
        default=None, gt=0, description="Factor that cos and sin are multiplied by. Default: 0.1·ln(factor) + 1."
    )

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        return self.by_parts(rope, context_len, attention_factor=self.attention_factor)


class LongRoPE(Factor):
    """LongRoPE: every dimension divided by its own factor; the factors come from an external search.

    Example:
        >>> import unspool
        >>> unspool.LongRoPE(short_factor=[1.0, 1.0], long_factor=[1.2, 8.0]).long_factor
        (1.2, 8.0)
    """

    method: Literal["longrope"] = "longrope"
    uses_max_positions: ClassVar[bool] = True
    requirement: ClassVar[str | None] = "factors from a search: short_factor and long_factor, or file"
    short_factor: tuple[float, ...] | None = Field(
        default=None,
        description="Divisors of the frequencies for inputs up to the original length, one per rotated pair of "
        "dimensions.",
    )
    long_factor: tuple[float, ...] | None = Field(
        default=None, description="Divisors of the frequencies for longer inputs, one per rotated pair of dimensions."
    )
    file: str | None = Field(
        default=None,
        description="JSON file with `short_factor` and `long_factor`, such as a model's config.json. Use it instead "
        "of the two keys.",
    )
    attention_factor: float | None = Field(
        default=None,
        gt=0,
        description="Factor that cos and sin are multiplied by. Default: √(1 + ln factor ÷ ln original).",
    )

    @classmethod
    def suggest(cls, rope: RopeShape, context_len: int, base: float) -> Self | None:
        return None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, plain: Any) -> Any:
        """Read the factors from the file at once, so that the recorded recipe holds numbers and no file name."""
        if not isinstance(plain, dict) or not plain.get("file"):
            return plain
        if plain.get("short_factor") or plain.get("long_factor"):
            if "short_factor" in plain and "long_factor" in plain:
                return plain  # a recorded recipe
            raise ValueError("give file, or short_factor and long_factor, but not both")
        try:
            found = json.loads(Path(str(plain["file"])).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"file {plain['file']} is not readable JSON ({type(error).__name__})") from None
        for place in ("rope_parameters", "rope_scaling"):
            found = found.get(place) or found if isinstance(found, dict) else {}
        return {**plain, "short_factor": found.get("short_factor"), "long_factor": found.get("long_factor")}

    @model_validator(mode="after")
    def _has_factors(self) -> "LongRoPE":
        if not self.short_factor or not self.long_factor or min(self.short_factor + self.long_factor) <= 0:
            raise ValueError("longrope needs short_factor and long_factor, numbers above 0, or a file that holds both")
        return self

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        factor, original = self.stretch(rope, context_len), self.original_len(rope)
        assert self.short_factor and self.long_factor
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != rope.rotary_dim // 2:
                raise ConfigError(
                    f"rope longrope: {name} holds {len(factors)} numbers, but this model rotates "
                    f"{rope.rotary_dim // 2} pairs of dimensions; give one number per pair."
                )
        lists = {"short_factor": list(self.short_factor), "long_factor": list(self.long_factor)}
        parameters = scaled("longrope", rope, factor, original, attention_factor=self.attention_factor, **lists)
        return RopeSettings(parameters=parameters, max_positions=max(context_len, round(factor * original)))


class Llama3(Factor):
    """Llama 3.1's scaling: divides slow dimensions by the factor, keeps fast ones, blends those between.

    Example:
        >>> import unspool
        >>> unspool.Llama3(factor=8).high_freq_factor
        4
    """

    method: Literal["llama3"] = "llama3"
    low_freq_factor: float = Field(
        default=1,
        gt=0,
        description="Dimensions with fewer rotations than this over the original length have their frequency divided "
        "by `factor`.",
    )
    high_freq_factor: float = Field(
        default=4,
        gt=0,
        description="Dimensions with more rotations than this over the original length keep their frequency.",
    )

    @model_validator(mode="after")
    def _between(self) -> "Llama3":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")
        return self

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        factor, original = self.stretch(rope, context_len), self.original_len(rope)
        limits = {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        return RopeSettings(
            parameters=scaled("llama3", rope, factor, original, **limits),
            # Meta's own factor is half of context ÷ original, so max_positions is not factor × original.
            max_positions=context_len,
        )


class SelfExtend(RopeMethod):
    """Self-Extend: far keys share positions in groups, near keys keep theirs; without training (Jin et al.)."""

    method: Literal["self-extend"] = "self-extend"
    needs_weights: ClassVar[bool] = True
    trainable: ClassVar[bool] = False
    window: Size = Field(default=1024, description="Distance in tokens below which every key keeps its own position.")
    group: int = Field(
        default=32, ge=2, description="Number of neighboring keys that share one position beyond the window."
    )

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        reach = (rope.original_len - self.window) * self.group + self.window
        if self.window >= rope.original_len or reach < context_len:
            raise ConfigError(
                f"rope self-extend: window {self.window} and group {self.group} reach {max(reach, 0):,} tokens of a "
                f"model with {rope.original_len:,}, and the context is {context_len:,}; use a greater group or a "
                "smaller window."
            )
        return RopeSettings(
            head_bases=np.full(rope.num_kv_heads, rope.base),
            max_positions=max(context_len, rope.max_positions),
            self_extend=(self.window, self.group),
        )


ROPE_METHODS: dict[str, type[RopeMethod]] = {
    "unchanged": Unchanged,
    "abf": ABF,
    "ntk": NTK,
    "pi": PI,
    "dynamic": Dynamic,
    "ntk-by-parts": NTKByParts,
    "yarn": YaRN,
    "longrope": LongRoPE,
    "llama3": Llama3,
    "harpe": HARPE,
    "cope": CoPE,
    "drope": DroPE,
    "self-extend": SelfExtend,
}

# The type of a config field that takes any registered method.
AnyRopeMethod = Annotated[RopeMethod, FromRegistry(ROPE_METHODS, "method")]

Method = TypeVar("Method", bound=type[RopeMethod])


def method_name(cls: type[RopeMethod]) -> str:
    """Return the name of a method in recipes: the only value of its field `method`."""
    return tag_value(cls, "method")


def register_rope_method(cls: Method) -> Method:
    """Add a method to `ROPE_METHODS`. Call it, or use it as a decorator."""
    register(ROPE_METHODS, method_name(cls), cls, kind="RoPE method")
    return cls
