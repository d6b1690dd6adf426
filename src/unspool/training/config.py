"""What one entry of a recipe's `stages` may say."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.sizes import Size
from unspool.models.memory.policy import MemoryPolicy, Recompute
from unspool.rope.methods import AnyRopeMethod, Unchanged
from unspool.training.optim.config import OptimizerConfig
from unspool.training.parallel.config import ParallelConfig
from unspool.training.spike_guard import GuardConfig

# What a stage may ask to be shown while it trains. None of it changes what is trained.


TrackerName = Literal["tensorboard", "wandb"]


class ValidationConfig(Config):
    """Loss on rows that are not trained on, by position."""

    dataset: str = Field(min_length=1, description="rows that no mix of this stage holds")
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


# What a stage may say about attention distillation. Apart from distill.py: needs no torch.


# Rows per step where a recipe does not say.
ROWS_PER_STEP = 8


class AttentionDistillationConfig(Config):
    """Queries and keys are fitted so that each layer attends as it did in the model that the stage starts from."""

    datasets: str | dict[str, float] = Field(description="rows, or rows with shares of tokens, within the old context")
    before: int = Field(0, ge=0, description="steps before the first step of training")
    during: float = Field(0.0, ge=0, description="weight of this distance beside training's loss, in each of its steps")
    after: int = Field(0, ge=0, description="steps after the last step of training")
    batch_tokens: Size | None = Field(None, description="tokens per step; 8 rows when not given")
    during_batch_tokens: Size | None = Field(
        None, description="the same beside a step of training; as batch_tokens when not given"
    )
    lr: float | None = Field(None, gt=0, description="Adam's highest rate, for before and after")
    after_lr: float | None = Field(None, gt=0, description="the same after training; a quarter of lr when not given")

    @field_validator("datasets")
    @classmethod
    def _positive(cls, datasets: str | dict[str, float]) -> str | dict[str, float]:
        if not datasets or (isinstance(datasets, dict) and min(datasets.values()) <= 0):
            raise ValueError("name rows, or rows with shares above 0, such as {short: 0.75, recall: 0.25}")
        return datasets

    @model_validator(mode="after")
    def _does_something(self) -> "AttentionDistillationConfig":
        if not self.before and not self.during and not self.after:
            raise ValueError(
                "give before or after, numbers of steps, or during, a weight; or leave attention_distillation out"
            )
        if (self.before and self.lr is None) or (self.after and self.lr is None and self.after_lr is None):
            raise ValueError("give lr, the highest rate of its own steps, such as 4e-3")
        return self

    @property
    def shares(self) -> dict[str, float]:
        return {self.datasets: 1.0} if isinstance(self.datasets, str) else self.datasets

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
    init: str = Field("previous", description="previous | base | the name of an earlier stage")
    context_length: Size
    export_context_length: Size | None = Field(
        None, description="the context that the trained model claims; this one when not given"
    )
    rope: AnyRopeMethod = Unchanged()
    attention_distillation: AttentionDistillationConfig | None = Field(
        None, description="queries and keys fitted to what the model attended to before its positions were changed"
    )
    attention: Literal["intra_document", "full"] = Field(
        "intra_document",
        description="intra_document: each sees only itself, but in rows of utk, cip or nextlong; full: rows see all",
    )
    mix: dict[str, float] = Field(description="rows: share of tokens")
    tokens: Size
    batch_tokens: Size = Field(description="tokens per optimizer step")
    micro_batch_tokens: Size | None = Field(None, description="tokens per forward pass; one context when not given")
    lr: float = Field(gt=0)
    lr_overrides: dict[str, float] = Field(
        {}, description="part of a parameter's name: its lr instead; 0 leaves it as it is, as in {mlp: 0, q_proj: 1e-4}"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="the cosine ends at this share of lr")
    warmup_ratio: float = Field(0.1, ge=0, lt=1, description="share of steps")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    activation_checkpointing: Recompute = Field(
        "none", description="activations computed again in the backward pass; keep-attention: all but attention's"
    )
    layers_per_checkpoint: int = Field(1, ge=1, description="layers that share a checkpoint")
    offload: bool = Field(False, description="checkpoints of recomputed layers wait in host memory")
    keep_products: int = Field(
        0,
        ge=0,
        description="layers, from the last, that keep matrix products; with activation_checkpointing keep-attention",
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
    loggers: list[TrackerName] = Field([], description="where the numbers go besides metrics.jsonl")

    @field_validator("mix")
    @classmethod
    def _positive(cls, mix: dict[str, float]) -> dict[str, float]:
        if not mix or min(mix.values()) <= 0:
            raise ValueError("every share must be above 0, such as {books-64k: 0.6, short: 0.4}")
        return mix

    @model_validator(mode="after")
    def _held_out(self) -> "StageConfig":
        if self.validation and self.validation.dataset in self.mix:
            raise ValueError(
                f"validation.dataset {self.validation.dataset} is in the mix, so its loss would say nothing about new "
                "text; give one that is made from another source"
            )
        return self

    @model_validator(mode="after")
    def _distillation_has_something_to_fit(self) -> "StageConfig":
        if self.attention_distillation and self.attention_distillation.before and self.rope.keeps_frequencies:
            raise ValueError(
                "attention_distillation.before has nothing to do while rope is unchanged; give a rope method, or leave "
                "attention_distillation.before out"
            )
        if (
            self.attention_distillation
            and self.validation
            and self.validation.dataset in self.attention_distillation.shares
        ):
            raise ValueError(
                f"validation.dataset {self.validation.dataset} is in attention_distillation.datasets, so its loss "
                "would say "
                "little about new "
                "text; give one that is made from another source"
            )
        return self

    @field_validator("lr_overrides")
    @classmethod
    def _not_negative(cls, lr_overrides: dict[str, float]) -> dict[str, float]:
        if any(lr < 0 or not name for name, lr in lr_overrides.items()):
            raise ValueError("every lr must be 0 or more and stand after a part of a name, such as {q_proj: 1e-4}")
        return lr_overrides

    @model_validator(mode="after")
    def _whole_contexts(self) -> "StageConfig":
        if self.batch_tokens % self.context_length:
            raise ValueError(f"batch_tokens must be a multiple of context_length ({self.context_length} tokens)")
        if self.micro_batch_tokens and (
            self.micro_batch_tokens % self.context_length or self.batch_tokens % self.micro_batch_tokens
        ):
            raise ValueError("micro_batch_tokens must be a multiple of context_length and divide batch_tokens")
        if (
            self.optimizer.step == "in-backward"
            and (self.micro_batch_tokens or self.context_length) != self.batch_tokens
        ):
            raise ValueError(
                "optimizer.step in-backward has no gradient left to add a second one to, so batch_tokens must equal "
                f"micro_batch_tokens ({self.micro_batch_tokens or self.context_length} tokens); or set "
                "optimizer.step to after"
            )
        if self.tokens < self.batch_tokens:
            raise ValueError("tokens must be at least one batch")
        if self.export_context_length and self.export_context_length > self.context_length:
            raise ValueError(
                "export_context_length must not exceed context_length: the model would claim what it never saw"
            )
        if (
            self.export_context_length
            and self.export_context_length < self.context_length
            and self.rope.uses_max_positions
        ):
            raise ValueError(
                f"export_context_length cannot be below context_length with method {self.rope.method}, whose positions "
                "depend on what the model claims; use abf, ntk or harpe"
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
            activation_checkpointing=self.activation_checkpointing,
            layers_per_checkpoint=self.layers_per_checkpoint,
            offload=self.offload,
            keep_products=self.keep_products,
            keep_on_host=self.keep_on_host,
            mlp_tiles=self.mlp_tiles,
            attention_heads_at_once=self.attention_heads_at_once,
        )

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens
