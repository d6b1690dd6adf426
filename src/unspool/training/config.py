"""What one entry of a recipe's `stages` may say."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.sizes import Size
from unspool.models.memory.policy import MemoryPolicy, Recompute
from unspool.rope.methods import AnyPosition, Unchanged
from unspool.training.optim.config import OptimizerConfig
from unspool.training.parallel.config import ParallelConfig
from unspool.training.spike_guard import GuardConfig

# What a stage may ask to be shown while it trains. None of it changes what is trained.


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


# What a stage may say about refitting queries and keys. Apart from refit.py: needs no torch.


# Rows per step where a recipe does not say.
ROWS_PER_STEP = 8


class RefitConfig(Config):
    """Queries and keys are fitted so that each layer attends as it did in the model that the stage starts from."""

    rows: str | dict[str, float] = Field(description="rows, or rows with shares of tokens, within the old context")
    before: int = Field(0, ge=0, description="steps before the first step of training")
    during: float = Field(0.0, ge=0, description="weight of this distance beside training's loss, in each of its steps")
    after: int = Field(0, ge=0, description="steps after the last step of training")
    batch: Size | None = Field(None, description="tokens per step; 8 rows when not given")
    during_batch: Size | None = Field(None, description="the same beside a step of training; as batch when not given")
    lr: float | None = Field(None, gt=0, description="Adam's highest rate, for before and after")
    after_lr: float | None = Field(None, gt=0, description="the same after training; a quarter of lr when not given")

    @field_validator("rows")
    @classmethod
    def _positive(cls, rows: str | dict[str, float]) -> str | dict[str, float]:
        if not rows or (isinstance(rows, dict) and min(rows.values()) <= 0):
            raise ValueError("name rows, or rows with shares above 0, such as {short: 0.75, recall: 0.25}")
        return rows

    @model_validator(mode="after")
    def _does_something(self) -> "RefitConfig":
        if not self.before and not self.during and not self.after:
            raise ValueError("give before or after, numbers of steps, or during, a weight; or leave refit out")
        if (self.before and self.lr is None) or (self.after and self.lr is None and self.after_lr is None):
            raise ValueError("give lr, the highest rate of its own steps, such as 4e-3")
        return self

    @property
    def shares(self) -> dict[str, float]:
        return {self.rows: 1.0} if isinstance(self.rows, str) else self.rows

    @property
    def lr_before(self) -> float:
        assert self.lr is not None
        return self.lr

    @property
    def lr_after(self) -> float:
        return self.lr_before / 4 if self.after_lr is None else self.after_lr


class StageConfig(Config):
    """One training stage: a mix of rows at one context length under one schedule."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    start: str = Field("previous", description="previous | model | the name of an earlier stage")
    context: Size
    claim: Size | None = Field(None, description="the context that the trained model claims; this one when not given")
    position: AnyPosition = Unchanged()
    refit: RefitConfig | None = Field(
        None, description="queries and keys fitted to what the model attended to before its positions were changed"
    )
    attention: Literal["documents", "full"] = Field(
        "documents",
        description="documents: each sees only itself, but in tangled or interleaved rows; full: rows see everything",
    )
    mix: dict[str, float] = Field(description="rows: share of tokens")
    tokens: Size
    batch: Size = Field(description="tokens per optimizer step")
    micro_batch: Size | None = Field(None, description="tokens per forward pass; one context when not given")
    lr: float = Field(gt=0)
    lr_for: dict[str, float] = Field(
        {}, description="part of a parameter's name: its lr instead; 0 leaves it as it is, as in {mlp: 0, q_proj: 1e-4}"
    )
    lr_floor: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of lr")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of steps")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    recompute: Recompute = Field(
        "none", description="activations computed again in the backward pass; keep-attention: all but attention's"
    )
    recompute_every: int = Field(1, ge=1, description="layers that share a checkpoint")
    offload: bool = Field(False, description="checkpoints of recomputed layers wait in host memory")
    keep_products: int = Field(
        0, ge=0, description="layers, from the last, that keep their matrix products too; with recompute keep-attention"
    )
    keep_on_host: int = Field(0, ge=0, description="of those layers, how many have what they keep in host memory")
    mlp_tiles: Size | None = Field(None, description="tokens that norms and MLPs compute at a time")
    attention_heads_at_once: int | None = Field(None, ge=1, description="KV heads that attention computes at a time")
    parallel: ParallelConfig = ParallelConfig()
    compile: bool = Field(False, description="fuse norms and MLPs with torch.compile; pays on a GPU")
    checkpoint_every: int | None = Field(None, ge=1, description="steps; a tenth of the stage when not given")
    guard: GuardConfig = GuardConfig()
    validation: ValidationConfig | None = Field(None, description="loss by position on rows that are not trained on")
    samples: SamplesConfig | None = Field(None, description="what the model writes after some prompts")
    track: list[TrackerName] = Field([], description="where the numbers go besides metrics.jsonl")

    @field_validator("mix")
    @classmethod
    def _positive(cls, mix: dict[str, float]) -> dict[str, float]:
        if not mix or min(mix.values()) <= 0:
            raise ValueError("every share must be above 0, such as {books-64k: 0.6, short: 0.4}")
        return mix

    @model_validator(mode="after")
    def _held_out(self) -> "StageConfig":
        if self.validation and self.validation.rows in self.mix:
            raise ValueError(
                f"validation.rows {self.validation.rows} are in the mix, so their loss would say nothing about new "
                "text; give rows that are made from another source"
            )
        return self

    @model_validator(mode="after")
    def _refit_has_something_to_fit(self) -> "StageConfig":
        if self.refit and self.refit.before and self.position.keeps_frequencies:
            raise ValueError(
                "refit.before has nothing to do while position is unchanged; give a position method, or leave "
                "refit.before out"
            )
        if self.refit and self.validation and self.validation.rows in self.refit.shares:
            raise ValueError(
                f"validation.rows {self.validation.rows} are in refit.rows, so their loss would say little about new "
                "text; give rows that are made from another source"
            )
        return self

    @field_validator("lr_for")
    @classmethod
    def _not_negative(cls, lr_for: dict[str, float]) -> dict[str, float]:
        if any(lr < 0 or not name for name, lr in lr_for.items()):
            raise ValueError("every lr must be 0 or more and stand after a part of a name, such as {q_proj: 1e-4}")
        return lr_for

    @model_validator(mode="after")
    def _whole_contexts(self) -> "StageConfig":
        if self.batch % self.context:
            raise ValueError(f"batch must be a multiple of context ({self.context} tokens)")
        if self.micro_batch and (self.micro_batch % self.context or self.batch % self.micro_batch):
            raise ValueError("micro_batch must be a multiple of context and divide batch")
        if self.optimizer.step == "in-backward" and (self.micro_batch or self.context) != self.batch:
            raise ValueError(
                "optimizer.step in-backward has no gradient left to add a second one to, so batch must equal "
                f"micro_batch ({self.micro_batch or self.context} tokens); or set optimizer.step to after"
            )
        if self.tokens < self.batch:
            raise ValueError("tokens must be at least one batch")
        if self.claim and self.claim > self.context:
            raise ValueError("claim must not exceed context: the model would claim what it never saw")
        if self.claim and self.claim < self.context and self.position.uses_max_positions:
            raise ValueError(
                f"claim cannot be below context with method {self.position.method}, whose positions depend on what the "
                "model claims; use abf, ntk or harpe"
            )
        return self

    @model_validator(mode="after")
    def _can_skip(self) -> "StageConfig":
        if self.optimizer.step == "in-backward" and "skip" in (self.guard.nan, self.guard.spike):
            raise ValueError(
                "guard cannot skip a step under optimizer.step in-backward, which has changed weights before the step "
                "is known to be wrong; use stop, or optimizer.step after"
            )
        return self

    @model_validator(mode="after")
    def _sensible_memory(self) -> "StageConfig":
        try:
            _ = self.memory
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def memory(self) -> MemoryPolicy:
        return MemoryPolicy(
            recompute=self.recompute,
            recompute_every=self.recompute_every,
            offload=self.offload,
            keep_products=self.keep_products,
            keep_on_host=self.keep_on_host,
            mlp_tiles=self.mlp_tiles,
            attention_heads_at_once=self.attention_heads_at_once,
        )

    @property
    def steps(self) -> int:
        return self.tokens // self.batch
