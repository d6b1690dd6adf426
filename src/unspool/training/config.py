"""Config of a training stage: one entry of a recipe's `stages`. Imports no torch."""

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.sizes import Size
from unspool.models.memory.policy import MemoryPolicy, Recompute
from unspool.rope.methods import AnyRopeMethod, Unchanged
from unspool.training.losses.config import AnyLoss, UniformLoss
from unspool.training.optim.config import AdamWConfig, AnyOptimizer
from unspool.training.parallel.config import ParallelConfig

# FP8 units multiply matrices whose sides are multiples of this.
FP8_MULTIPLE = 16
TrackerName = Literal["tensorboard", "wandb"]


class ValidationConfig(Config):
    """Held-out loss by position."""

    dataset: str = Field(min_length=1, description="Dataset that is not in the `mix` of this stage.")
    every: int | None = Field(None, ge=1, description="Steps between validations. Default: a tenth of the stage.")
    samples: int = Field(
        8, ge=1, description="Number of rows. The seed draws them once, so every validation uses the same rows."
    )


class SamplesConfig(Config):
    """Continuations of prompts that the model writes while it trains."""

    prompts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] = Field(
        description="Texts that the model continues."
    )
    every: int | None = Field(None, ge=1, description="Steps between samples. Default: a tenth of the stage.")
    tokens: Size = Field(64, description="Longest continuation, in tokens.")


def is_due(every: int | None, step: int, steps: int) -> bool:
    """Return whether to validate or sample now: before the first step, every `every` steps, and after the last."""
    return step % (every or max(1, steps // 10)) == 0 or step == steps


class GuardConfig(Config):
    """Handling of bad steps. A skipped step changes no weight, and its rows are not used again."""

    nan: Literal["stop", "skip"] = Field(
        "stop", description="What to do if the loss or the gradient is not finite: stop the stage, or skip the step."
    )
    spike: Literal["off", "stop", "skip"] = Field(
        "off",
        description="What to do if the loss or the gradient norm is far above its median: nothing, stop the stage, or "
        "skip the step.",
    )
    factor: float = Field(2.0, gt=1, description="A loss above this multiple of its median is a spike.")
    grad_factor: float = Field(10.0, gt=1, description="A gradient norm above this multiple of its median is a spike.")
    window: int = Field(
        64,
        ge=2,
        description="Number of good steps that the median covers. Spikes are detected only after that many steps.",
    )
    most_skips: int = Field(10, ge=1, description="Number of consecutive skipped steps that stop the stage.")


# Rows per step of attention distillation, by default.
ROWS_PER_STEP = 8


class AttentionDistillationConfig(Config):
    """Fit queries and keys so that each layer attends as in the stage's starting model."""

    datasets: str | dict[str, float] = Field(
        description="Dataset, or datasets with shares of tokens. Their rows must not exceed the context length before "
        "the stage."
    )
    before: int = Field(
        0, ge=0, description="Distillation steps before the first training step. Needs a `rope` other than `unchanged`."
    )
    during: float = Field(
        0.0, ge=0, description="Weight of the distillation loss in every training step. 0 turns it off."
    )
    after: int = Field(0, ge=0, description="Distillation steps after the last training step, before the export.")
    batch_tokens: Size | None = Field(None, description="Tokens per distillation step. Default: 8 rows.")
    during_batch_tokens: Size | None = Field(
        None, description="Tokens of `datasets` per training step, used with `during`. Default: `batch_tokens`."
    )
    lr: float | None = Field(
        None, gt=0, description="Peak learning rate of Adam in the steps of `before` and `after`. Required by `before`."
    )
    after_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of Adam in the steps of `after`. Default: a quarter of `lr`."
    )

    @field_validator("datasets")
    @classmethod
    def _check_shares(cls, datasets: str | dict[str, float]) -> str | dict[str, float]:
        if not datasets or (isinstance(datasets, dict) and min(datasets.values()) <= 0):
            raise ValueError("give a dataset, or datasets with shares above 0, such as {short: 0.75, recall: 0.25}")
        return datasets

    @model_validator(mode="after")
    def _check_phases(self) -> "AttentionDistillationConfig":
        if not self.before and not self.during and not self.after:
            raise ValueError("set before or after (steps) or during (a weight), or remove attention_distillation")
        if (self.before and self.lr is None) or (self.after and self.lr is None and self.after_lr is None):
            raise ValueError("set lr, the peak learning rate of its own steps, such as 4e-3")
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


class ReportedHours(Config):
    """Hours that a paper reports for a stage; `unspool plan` prints them next to its own estimate."""

    source: str = Field(min_length=1, description="Paper and table.")
    gpu: str = Field(min_length=1, description="Device that the hours refer to, such as H100.")
    gpu_hours: float = Field(gt=0, description="Total device hours.")
    tokens: Size = Field(description="Tokens trained on in these hours.")
    why: str | None = Field(None, description="Possible reason for a difference from the plan.")


class StageConfig(Config):
    """One training stage: a mix of rows at one context length under one schedule."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100, description="Name of the stage, and of its folder."
    )
    init: str = Field(
        "previous",
        description="Model to start from: `previous` (the stage before), `base` (the recipe's model) or the name of "
        "an earlier stage.",
    )
    context_length: Size = Field(
        description="Context length of the training, in tokens. A multiple of `seq_len` of every dataset in `mix`."
    )
    export_context_length: Size | None = Field(
        None, description="Value written to `max_position_embeddings` on export. Default: `context_length`."
    )
    rope: AnyRopeMethod = Field(Unchanged(), description="RoPE method that extends the context length.")
    attention_distillation: AttentionDistillationConfig | None = Field(
        None, description="Fit queries and keys so that each layer attends as before the RoPE change."
    )
    attention: Literal["intra_document", "full"] = Field(
        "intra_document",
        description="`intra_document` applies a document mask, except in rows of `utk`, `cip` and `nextlong`; `full` "
        "is causal attention over the whole row.",
    )
    mix: dict[str, float] = Field(description="Datasets and their shares of tokens. Only the proportions count.")
    tokens: Size = Field(description="Tokens to train on, rounded down to whole steps.")
    batch_tokens: Size = Field(description="Tokens per optimizer step. A multiple of `context_length`.")
    micro_batch_tokens: Size | None = Field(
        None,
        description="Tokens per forward pass. A multiple of `context_length` that divides `batch_tokens`. Default: "
        "`context_length`.",
    )
    lr: float = Field(gt=0, description="Peak learning rate.")
    lr_overrides: dict[str, float] = Field(
        {},
        description="Learning rates by substring of a parameter name; the first match counts. 0 freezes the "
        "parameter, as in {mlp: 0, q_proj: 1e-4}.",
    )
    schedule: Literal["cosine", "linear"] = Field(
        "cosine", description="How the learning rate decays after warm-up: along a cosine or a straight line."
    )
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate of the last step ÷ `lr`. 1 keeps the rate constant after warm-up."
    )
    warmup_ratio: float = Field(0.1, ge=0, lt=1, description="Share of steps with linear warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's decay rates of the first and second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay of matrices. Norms and biases are not decayed.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm above which gradients are clipped.")
    loss: AnyLoss = Field(UniformLoss(), description="Weights of labels in the loss.")
    optimizer: AnyOptimizer = Field(
        AdamWConfig(), description="Optimizer, and the precision of its weights and states."
    )
    precision: Literal["bf16", "fp8"] = Field(
        "bf16",
        description="Precision of matrix products on a GPU. `fp8` rounds the operands of the layers' linear layers to "
        "FP8 (E4M3) with one scale each, forward and backward; weights keep the precision of `optimizer`, and "
        "attention, embeddings and head stay in bf16. An experiment: needs the environment variable "
        "`UNSPOOL_EXPERIMENTAL=fp8`, and one GPU of compute capability 8.9 or newer. A CPU computes "
        "bf16 as fp32, and fp8 with the same rounding, slowly, for tests.",
    )
    bf16_layers: int = Field(
        0, ge=0, description="Number of first and of last layers that stay in bf16 with `precision: fp8`."
    )
    optimizer_state: Literal["keep", "reset"] = Field(
        "keep", description="Keep or reset the optimizer state of the stage that this one starts from."
    )
    activation_checkpointing: Recompute = Field(
        "none",
        description="What the backward pass recomputes: nothing, all but attention (`keep-attention`), or whole "
        "layers (`full`).",
    )
    layers_per_checkpoint: int = Field(1, ge=1, description="Layers per activation checkpoint.")
    offload: bool = Field(False, description="Keep activation checkpoints in host memory.")
    keep_products: int = Field(
        0,
        ge=0,
        description="Number of last layers that also keep their matrix products. Needs `activation_checkpointing: "
        "keep-attention`.",
    )
    keep_on_host: int = Field(
        0, ge=0, description="How many of the `keep_products` layers keep their results in host memory."
    )
    mlp_tiles: Size | None = Field(None, description="Tokens per tile of norms and MLPs. Default: no tiling.")
    attention_heads_at_once: int | None = Field(
        None, ge=1, description="KV heads per call of the attention kernel. Default: all."
    )
    parallel: ParallelConfig = Field(ParallelConfig(), description="How the ranks of a run share the work.")
    compile: bool = Field(False, description="Fuse norms and MLPs with torch.compile, which is faster on a GPU.")
    checkpoint_every: int | None = Field(
        None, ge=1, description="Steps between checkpoints. Default: a tenth of the stage."
    )
    eval_every: int | None = Field(
        None,
        ge=1,
        description="Steps between exports that are also scored, after the stage has ended. Default: score only the "
        "final model.",
    )
    guard: GuardConfig = Field(
        GuardConfig(), description="What to do if a step's loss or gradient is not finite or too large."
    )
    validation: ValidationConfig | None = Field(
        None, description="Measure held-out loss by position during the stage. Default: no validation."
    )
    samples: SamplesConfig | None = Field(
        None, description="Let the model continue prompts during the stage. Default: no samples."
    )
    reported: ReportedHours | None = Field(
        None, description="Time that a paper reports for this stage. `unspool plan` prints it next to its own estimate."
    )
    loggers: list[TrackerName] = Field(
        [],
        description="Trackers that get the metrics in addition to `metrics.jsonl`. Needs `pip install "
        "'unspool[track]'`.",
    )

    @field_validator("mix")
    @classmethod
    def _check_shares(cls, mix: dict[str, float]) -> dict[str, float]:
        if not mix or min(mix.values()) <= 0:
            raise ValueError("every share must be above 0, such as {books-64k: 0.6, short: 0.4}")
        return mix

    @model_validator(mode="after")
    def _check_validation(self) -> "StageConfig":
        if self.validation and self.validation.dataset in self.mix:
            raise ValueError(
                f"validation.dataset {self.validation.dataset} is in the mix, so it is not held out; use a dataset "
                "from another source"
            )
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> "StageConfig":
        distillation = self.attention_distillation
        if distillation and distillation.before and self.rope.keeps_frequencies:
            raise ValueError(
                "attention_distillation.before has no effect while rope is unchanged; set a rope method, or remove "
                "attention_distillation.before"
            )
        if distillation and self.validation and self.validation.dataset in distillation.shares:
            raise ValueError(
                f"validation.dataset {self.validation.dataset} is in attention_distillation.datasets, so it is not "
                "held out; use a dataset from another source"
            )
        return self

    @field_validator("lr_overrides")
    @classmethod
    def _check_rates(cls, lr_overrides: dict[str, float]) -> dict[str, float]:
        if any(lr < 0 or not name for name, lr in lr_overrides.items()):
            raise ValueError("give substrings of parameter names with an lr of 0 or more, such as {q_proj: 1e-4}")
        return lr_overrides

    @model_validator(mode="after")
    def _check_sizes(self) -> "StageConfig":
        if self.batch_tokens % self.context_length:
            raise ValueError(f"batch_tokens must be a multiple of context_length ({self.context_length} tokens)")
        if self.micro_batch_tokens and (
            self.micro_batch_tokens % self.context_length or self.batch_tokens % self.micro_batch_tokens
        ):
            raise ValueError("micro_batch_tokens must be a multiple of context_length and divide batch_tokens")
        if self.optimizer.step == "in-backward" and self.tokens_per_pass != self.batch_tokens:
            raise ValueError(
                "optimizer.step in-backward cannot accumulate gradients, so batch_tokens must equal micro_batch_tokens "
                f"({self.tokens_per_pass} tokens); or set optimizer.step to after"
            )
        if self.tokens < self.batch_tokens:
            raise ValueError("tokens must be at least one batch")
        if not self.rope.trainable:
            raise ValueError(
                f"rope method {self.rope.method} is for evaluation without training: unspool eval MODEL --rope "
                f"{self.rope.method}"
            )
        if self.export_context_length and self.export_context_length > self.context_length:
            raise ValueError(
                "export_context_length must not exceed context_length: the model is not trained on longer rows"
            )
        is_shorter = self.export_context_length and self.export_context_length < self.context_length
        if is_shorter and self.rope.uses_max_positions:
            raise ValueError(
                f"export_context_length cannot be below context_length with method {self.rope.method}, whose "
                "frequencies depend on max_position_embeddings; use abf, ntk or harpe"
            )
        return self

    @model_validator(mode="after")
    def _check_guard(self) -> "StageConfig":
        if self.optimizer.step == "in-backward" and "skip" in (self.guard.nan, self.guard.spike):
            raise ValueError(
                "guard cannot skip a step with optimizer.step in-backward, which changes weights before the step is "
                "checked; use stop, or optimizer.step after"
            )
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> "StageConfig":
        problem = self.loss.problem(self.context_length, self.parallel)
        if problem is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> "StageConfig":
        try:
            _ = self.memory
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> "StageConfig":
        problem = self._fp8_problem() if self.precision == "fp8" else None
        if self.precision != "fp8" and self.bf16_layers:
            problem = "bf16_layers counts layers without FP8, so it needs precision fp8; set it, or remove bf16_layers"
        if problem is not None:
            raise ValueError(problem)
        return self

    def _fp8_problem(self) -> str | None:
        if self.attention_distillation is not None:
            return "precision fp8 cannot be combined with attention_distillation; remove one of them"
        for name in ("context_length", "mlp_tiles"):
            tokens = getattr(self, name)
            if tokens is not None and tokens % FP8_MULTIPLE:
                better = max(1, tokens // FP8_MULTIPLE) * FP8_MULTIPLE
                return (
                    f"precision fp8 needs a {name} that is a multiple of {FP8_MULTIPLE} tokens; set it to {better}, or "
                    "precision to bf16"
                )
        return None

    @property
    def memory(self) -> MemoryPolicy:
        return MemoryPolicy(**{field.name: getattr(self, field.name) for field in fields(MemoryPolicy)})

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch_tokens or self.context_length

    def ranks_problem(self) -> str | None:
        """Return why these settings do not work on several ranks in any layout; None if they do."""
        if self.samples and self.parallel.offload:
            return "samples cannot be combined with parallel.offload; remove one of them."
        if self.precision == "fp8":
            return "precision fp8 is not supported on several devices yet; set it to bf16."
        return self.optimizer.sharding_problem()

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens
