"""CoPE: the lowest RoPE frequencies are lowered further, the lowest to zero (arXiv 2602.05258)."""

import math
from typing import ClassVar, Literal, Self

from pydantic import Field

from unspool.core.errors import ConfigError
from unspool.rope.tables import FROZEN, RopeMethod, RopeSettings, RopeShape, divided, format_base, one_base

# The authors' code tapers 20 of the 64 frequencies of Llama 3.
SHARE = 20 / 64


class CoPE(RopeMethod):
    """CoPE, clipped RoPE: one base, and a cosine taper over the lowest frequencies (arXiv 2602.05258).

    The first of the tapered frequencies stays as it is, and the last one becomes 0. `transformers` stores the result as
    `longrope` with the same divisors for short and long inputs.

    Example:
        >>> import unspool
        >>> unspool.CoPE(base=1e7, tapered=20).tapered
        20
    """

    method: Literal["cope"] = "cope"
    base: float | None = Field(default=None, gt=1, le=1e16, description="The RoPE base. Default: the model's own.")
    tapered: int | None = Field(
        default=None,
        ge=0,
        description="Number of frequencies that are tapered, from the lowest; 0 is plain RoPE. Default: 5/16 of them, "
        "as in the authors' code.",
    )
    uses_max_positions: ClassVar[bool] = True

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        base, tapered = self.base or rope.base, self.num_tapered(rope)
        num_frequencies, max_positions = rope.rotary_dim // 2, max(context_len, rope.max_positions)
        if tapered > num_frequencies:
            raise ConfigError(
                f"rope cope: tapered {tapered} exceeds the {num_frequencies} frequencies of this model; give at most "
                f"{num_frequencies}."
            )
        if tapered < 2:  # the taper begins with 1
            return RopeSettings(parameters=one_base(base), max_positions=max_positions)
        divisors = [1.0] * (num_frequencies - tapered) + [1 / each if each else FROZEN for each in taper(tapered)]
        return RopeSettings(parameters=divided(base, divisors, max_positions), max_positions=max_positions)

    def num_tapered(self, rope: RopeShape) -> int:
        return round(SHARE * rope.rotary_dim / 2) if self.tapered is None else self.tapered

    def describe(self, rope: RopeShape) -> str:
        return f"{self.method} with base {format_base(self.base or rope.base)}, {self.num_tapered(rope)} tapered"

    @classmethod
    def suggest(cls, rope: RopeShape, context_len: int, base: float) -> Self | None:
        return cls(method="cope", base=base)


def taper(count: int) -> list[float]:
    """Return ½ + ½·cos(πk ÷ (count − 1)) for k < count: from 1 to 0."""
    values = [0.5 + 0.5 * math.cos(math.pi * k / (count - 1)) for k in range(count - 1)]
    return [*values, 0.0]
