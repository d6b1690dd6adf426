"""The layout of a stage over devices, and checks of it. Imports no torch: recipes are checked without it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size

# Environment variable with the path of a file. A rank that refuses the job, so that a restart would not help, writes
# its message there and exits with code 0. So torchrun neither restarts the ranks nor prints a traceback. The program
# that set the variable prints the message.
REFUSAL = "UNSPOOL_REFUSAL"


class ParallelConfig(Config):
    """`parallel: {shard: auto, ulysses: 8, ring: 1, replicate: 1}`; their product is the number of ranks."""

    shard: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Number of data ranks that shard one replica of the weights (FSDP). `auto`: all remaining ranks.",
    )
    ulysses: int = Field(
        1, ge=1, description="Number of ranks that share a row by exchanging heads. It must divide the number of heads."
    )
    ring: int = Field(
        1, ge=1, description="Number of ranks that share a row by ring attention. Needs `attention: full`."
    )
    replicate: int = Field(1, ge=1, description="Number of replicas of the weights.")
    offload: bool = Field(
        False, description="Keep weights, gradients and optimizer state in host memory, and update them there."
    )


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Number of ranks on each axis."""

    replicate: int
    shard: int
    ring: int
    ulysses: int

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that train on different rows."""
        return self.replicate * self.shard

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share one row."""
        return self.ring * self.ulysses


@dataclass(frozen=True, kw_only=True)
class Work:
    """The settings of a stage that a layout must fit."""

    num_heads: int
    num_kv_heads: int
    context_length: int
    batch_tokens: int  # tokens per step
    micro_batch_tokens: int  # tokens per forward pass
    document_masks: bool  # whether rows can hold several documents that must not attend to each other
    not_on_ring: str | None = None  # feature of the model's attention that a ring cannot compute
    kv_heads_at_once: int | None = None  # attention_heads_at_once


def settle_layout(config: ParallelConfig, world_size: int) -> Layout:
    """Return the layout on `world_size` ranks; ConfigError if the product of the axes is not `world_size`."""
    others = {"ulysses": config.ulysses, "ring": config.ring, "replicate": config.replicate}
    product = prod(others.values())
    if world_size % product:
        asked = " × ".join(f"{name} {value}" for name, value in others.items() if value > 1)
        raise ConfigError(
            f"parallel: {asked} = {product} ranks do not divide the {world_size} ranks of this run; their product "
            f"must be one of {_join(divisors(world_size))}."
        )
    rest = world_size // product
    if config.shard not in ("auto", rest):
        raise ConfigError(
            f"parallel: shard={config.shard} times the other axes is {int(config.shard) * product} ranks, but this "
            f"run has {world_size}; use shard {rest} or auto."
        )
    return Layout(replicate=config.replicate, shard=rest, ring=config.ring, ulysses=config.ulysses)


def check_layout(layout: Layout, work: Work) -> None:
    """Raise a ConfigError, with values that fit, if the layout cannot compute the stage exactly."""
    _check_heads(layout.ulysses, work)
    _check_ring(layout, work)
    ranks, per_rank = layout.sequence_ranks, 2 if layout.ring > 1 else 1
    if work.context_length < ranks * per_rank:
        raise ConfigError(
            f"parallel: context_length {format_size(work.context_length)} has less than one token for each of "
            f"ring × ulysses = {ranks} ranks; use at most {work.context_length // per_rank} of them."
        )
    micro_batches = work.batch_tokens // work.micro_batch_tokens
    if micro_batches % layout.data_ranks:
        unit = work.micro_batch_tokens * layout.data_ranks
        fitting = f"batch_tokens to {format_size(unit * -(-work.batch_tokens // unit))}"
        raise ConfigError(
            f"parallel: a step of {micro_batches} micro-batches ({format_size(work.micro_batch_tokens)} tokens each) "
            f"does not divide among replicate × shard = {layout.data_ranks} groups of ranks; set {fitting}, or let "
            "more ranks share a row with ulysses or ring."
        )


def fits_heads(degree: int, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether `degree` ranks get equally many query heads, and whole KV heads or one shared KV head each."""
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)


def _check_heads(degree: int, work: Work) -> None:
    def fits(degree: int) -> bool:
        groups = work.num_heads // work.num_kv_heads
        return all(fits_heads(degree, part * groups, part) for part in _parts(work.num_kv_heads, work.kv_heads_at_once))

    if fits(degree):
        return
    fitting = [other for other in range(1, work.num_heads + 1) if fits(other)]
    heads = f"{work.num_heads} query and {work.num_kv_heads} KV heads"
    if work.kv_heads_at_once and fits_heads(degree, work.num_heads, work.num_kv_heads):
        several = [
            part
            for part in range(1, work.num_kv_heads + 1)
            if all(
                fits_heads(degree, some * work.num_heads // work.num_kv_heads, some)
                for some in _parts(work.num_kv_heads, part)
            )
        ]
        raise ConfigError(
            f"parallel: ulysses={degree} does not divide the heads of attention_heads_at_once="
            f"{work.kv_heads_at_once} (of {heads}); set attention_heads_at_once to "
            f"{_join(several)}, or ulysses to {_join(fitting)}."
        )
    raise ConfigError(
        f"parallel: ulysses={degree} does not fit {heads}, which must divide evenly among the ranks; use "
        f"{_join(fitting)}, and ring for more ranks than heads allow."
    )


def _check_ring(layout: Layout, work: Work) -> None:
    if layout.ring == 1:
        return
    if work.not_on_ring:
        raise ConfigError(
            f"parallel: ring={layout.ring} does not support {work.not_on_ring}, which this model has; use ring 1 and "
            "ulysses."
        )
    if work.document_masks:
        raise ConfigError(
            f"parallel: ring={layout.ring} does not support document masks, which this stage uses; use ring 1 and "
            "ulysses, or attention: full."
        )
    if work.micro_batch_tokens != work.context_length:
        raise ConfigError(
            f"parallel: ring={layout.ring} computes one row at a time, but micro_batch_tokens "
            f"{format_size(work.micro_batch_tokens)} holds {work.micro_batch_tokens // work.context_length}; set "
            f"micro_batch_tokens to {format_size(work.context_length)} or remove it."
        )


def not_on_ring(config: Mapping[str, Any], context_length: int) -> str | None:
    """Return the feature of a model's attention at a context length that a ring cannot compute; None without one."""
    if config.get("attn_logit_softcapping"):
        return "logit soft-caps"
    if config.get("model_type") == "gpt_oss":
        return "attention sinks"
    layers = config.get("layer_types")
    is_sliding = "sliding_attention" in layers if layers else config.get("use_sliding_window", True)
    window = config.get("sliding_window")
    return "sliding windows" if is_sliding and window and window < context_length else None


def _parts(num_kv_heads: int, at_once: int | None) -> set[int]:
    """Return the numbers of KV heads per call of the attention kernel."""
    at_once = min(at_once or num_kv_heads, num_kv_heads)
    return {at_once, num_kv_heads % at_once} - {0}


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _join(values: list[int]) -> str:
    *others, last = values
    return f"{', '.join(map(str, others))} or {last}" if others else str(last)
