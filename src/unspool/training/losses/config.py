"""The registry of loss weights. Imports no torch."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from unspool.core.config import FromRegistry, register, tag_value
from unspool.training.losses.base import LossConfig
from unspool.training.losses.exact import ExactLoss
from unspool.training.losses.longce import LongCELoss

if TYPE_CHECKING:
    from unspool.training.config import StageConfig


class UniformLoss(LossConfig):
    """The mean over all labels of a step: every label weighs the same."""

    weights: Literal["uniform"] = "uniform"

    def build(self, stage: "StageConfig", measured: Any) -> None:
        return None


LOSSES: dict[str, type[LossConfig]] = {"uniform": UniformLoss, "exact": ExactLoss, "longce": LongCELoss}


def register_loss(cls: type[LossConfig]) -> type[LossConfig]:
    """Add loss weights to `LOSSES`. Call it, or use it as a decorator, before a recipe is read."""
    register(LOSSES, tag_value(cls, "weights"), cls, kind="loss weights")
    return cls


# The type of a config field that takes any registered loss weights.
AnyLoss = Annotated[LossConfig, FromRegistry(LOSSES, "weights", default="uniform")]
