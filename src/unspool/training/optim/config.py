"""The registry of optimizers, and the config of AdamW. Imports no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from unspool.core.config import FromRegistry, register, tag_value
from unspool.training.optim.base import BF16_BYTES, FP32_BYTES, OptimizerConfig

if TYPE_CHECKING:
    from unspool.training.optim.adamw import AdamW


class AdamWConfig(OptimizerConfig):
    """AdamW, with moments in fp32 or 8 bits. docs/concepts/memory.md lists the bytes per parameter."""

    name: Literal["adamw"] = "adamw"
    states: Literal["fp32", "8bit"] = Field(
        "fp32",
        description="Precision of AdamW's moments. `8bit` stores them in blocks of 256 values with one scale each.",
    )

    def build(self) -> "AdamW":
        from unspool.training.optim.adamw import AdamW

        return AdamW(in_8bit=self.states == "8bit")

    def state_bytes(self) -> float:
        # 8-bit: two codes, and two fp32 scales per 256 values.
        return 2 * (1 + FP32_BYTES / 256) if self.states == "8bit" else 2 * FP32_BYTES

    def state_bytes_moved(self) -> float:
        # Scales are too small to count.
        return 4 if self.states == "8bit" else 4 * FP32_BYTES

    def grad_bytes(self) -> int:
        # torch's own AdamW needs fp32; our kernel takes the model's precision.
        return FP32_BYTES if (self.weights, self.states) == ("fp32", "fp32") else BF16_BYTES

    def alternatives(self) -> "Sequence[AdamWConfig]":
        return (
            AdamWConfig(states="8bit"),
            AdamWConfig(weights="bf16", states="8bit"),
            AdamWConfig(weights="bf16", states="8bit", step="in-backward"),
        )


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamWConfig}


def register_optimizer(cls: type[OptimizerConfig]) -> type[OptimizerConfig]:
    """Add an optimizer to `OPTIMIZERS`. Call it, or use it as a decorator, before a recipe is read."""
    register(OPTIMIZERS, tag_value(cls, "name"), cls, kind="optimizer")
    return cls


# The type of a config field that takes any registered optimizer.
AnyOptimizer = Annotated[OptimizerConfig, FromRegistry(OPTIMIZERS, "name", default="adamw")]
