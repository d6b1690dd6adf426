"""What a stage may ask to be shown while it trains. None of it changes what is trained."""

from typing import Annotated, Literal

from pydantic import Field

from unspool.base.config import Config
from unspool.base.sizes import Size

TrackerName = Literal["tensorboard", "wandb"]


class ValidationConfig(Config):
    """Loss on rows that are not trained on, by position."""

    rows: str = Field(min_length=1, description="rows that no mix of this stage holds")
    every: int | None = Field(None, ge=1, description="steps; a tenth of the stage when not given")
    samples: int = Field(8, ge=1, description="rows, drawn by the seed")


class SamplesConfig(Config):
    """What the model writes after some prompts."""

    prompts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    every: int | None = Field(None, ge=1, description="steps; a tenth of the stage when not given")
    tokens: Size = Field(64, description="at most, after each prompt")


def is_due(every: int | None, step: int, steps: int) -> bool:
    """Before the first step, then every so many, and after the last."""
    return step % (every or max(1, steps // 10)) == 0 or step == steps
