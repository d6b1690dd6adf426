"""What one entry of a recipe's `stages` may say."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from unspool.base.config import Config
from unspool.base.sizes import Size
from unspool.position.scaling import Position, Unchanged


class StageConfig(Config):
    """One training stage: a mix of rows at one context length under one schedule."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    start: str = Field("previous", description="previous | model | the name of an earlier stage")
    context: Size
    position: Position = Unchanged()
    attention: Literal["documents", "full"] = Field(
        "documents", description="documents: each sees only itself, except in tangled rows; full: rows see everything"
    )
    mix: dict[str, float] = Field(description="rows: share of tokens")
    tokens: Size
    batch: Size = Field(description="tokens per optimizer step")
    micro_batch: Size | None = Field(None, description="tokens per forward pass; one context when not given")
    lr: float = Field(gt=0)
    lr_floor: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of lr")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of steps")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, gt=0)
    recompute: Literal["none", "full"] = "none"
    compile: bool = Field(False, description="fuse norms and MLPs with torch.compile; pays on a GPU")
    checkpoint_every: int | None = Field(None, ge=1, description="steps; a tenth of the stage when not given")

    @field_validator("mix")
    @classmethod
    def _positive(cls, mix: dict[str, float]) -> dict[str, float]:
        if not mix or min(mix.values()) <= 0:
            raise ValueError("every share must be above 0, such as {books-64k: 0.6, short: 0.4}")
        return mix

    @model_validator(mode="after")
    def _whole_contexts(self) -> "StageConfig":
        if self.batch % self.context:
            raise ValueError(f"batch must be a multiple of context ({self.context} tokens)")
        if self.micro_batch and (self.micro_batch % self.context or self.batch % self.micro_batch):
            raise ValueError("micro_batch must be a multiple of context and divide batch")
        if self.tokens < self.batch:
            raise ValueError("tokens must be at least one batch")
        return self

    @property
    def steps(self) -> int:
        return self.tokens // self.batch
