"""DroPE: RoPE is removed, and a short recalibration teaches the model to do without (arXiv 2512.12167)."""

from typing import ClassVar, Literal

from pydantic import Field

from unspool.core.errors import ConfigError
from unspool.core.sizes import Size, format_size
from unspool.rope.tables import FROZEN, RopeMethod, RopeSettings, RopeShape, divided


class DroPE(RopeMethod):
    """DroPE: no rotation at all in layers with full attention; needs a short training run (arXiv 2512.12167).

    Only the causal mask then tells positions apart. `transformers` stores the method as `longrope` with divisors so
    large that no angle changes a number in fp32.

    Example:
        >>> import unspool
        >>> unspool.DroPE(extends_to="32K").extends_to
        32768
    """

    method: Literal["drope"] = "drope"
    extends_to: Size | None = Field(
        default=None,
        description="Context length to write into the config, if the model is to be used beyond the length it is "
        "recalibrated at. Default: the context length.",
    )
    uses_max_positions: ClassVar[bool] = True

    def resolve(self, rope: RopeShape, context_len: int) -> RopeSettings:
        if self.extends_to is not None and self.extends_to < context_len:
            raise ConfigError(
                f"rope drope: extends_to {format_size(self.extends_to)} is shorter than the context "
                f"{format_size(context_len)}; give at least that, or leave it out."
            )
        max_positions = max(self.extends_to or context_len, rope.max_positions)
        divisors = [FROZEN] * (rope.rotary_dim // 2)
        return RopeSettings(parameters=divided(rope.base, divisors, max_positions), max_positions=max_positions)

    def describe(self, rope: RopeShape) -> str:
        return f"{self.method}, no rotation"
