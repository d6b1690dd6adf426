"""How a stage is spread over devices, and which of the ways that one may ask for fit.

In: `parallel` of a stage, the number of ranks, the model's heads, the stage's lengths. Out: a `Layout`, or a sentence
with the values that would fit.
Promise: all is checked before a weight is loaded. Nothing here needs torch, so that a recipe is checked without it.
Elsewhere: process groups (mesh.py), what is done in them (ulysses.py, ring.py, fsdp.py).
"""

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from pydantic import Field

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size


class ParallelConfig(Config):
    """`parallel: {shard: auto, ulysses: 8, ring: 1, replicate: 1}`; their product is the number of ranks."""

    shard: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="groups of ranks with rows of their own and one copy of the weights; auto: as many as fit"
    )
    ulysses: int = Field(1, ge=1, description="ranks that share a row by exchanging heads")
    ring: int = Field(1, ge=1, description="ranks that share a row by passing keys on; for rows of one document")
    replicate: int = Field(1, ge=1, description="whole copies of the weights")
    offload: bool = Field(False, description="weights, gradients and moments wait in host memory")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks each axis has."""

    replicate: int
    shard: int
    ring: int
    ulysses: int

    @property
    def data_ranks(self) -> int:
        """Groups that train on rows of their own."""
        return self.replicate * self.shard

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share one row."""
        return self.ring * self.ulysses


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage asks of its layout."""

    num_heads: int
    num_kv_heads: int
    context_length: int
    batch_tokens: int  # tokens per step
    micro_batch_tokens: int  # tokens per forward pass
    document_masks: bool  # whether a row can hold more than one document that sees only itself
    kv_heads_at_once: int | None = None  # of attention_heads_at_once


def settle_layout(config: ParallelConfig, world_size: int) -> Layout:
    """The axes for so many ranks."""
    others = {"ulysses": config.ulysses, "ring": config.ring, "replicate": config.replicate}
    product = prod(others.values())
    if world_size % product:
        asked = " × ".join(f"{name} {value}" for name, value in others.items() if value > 1)
        raise ConfigError(
            f"parallel: {asked} = {product} ranks do not divide the {world_size} ranks of this run; their product "
            f"must be one of {_listed(_divisors(world_size))}."
        )
    rest = world_size // product
    if config.shard not in ("auto", rest):
        raise ConfigError(
            f"parallel: shard={config.shard} times the other axes makes {int(config.shard) * product} ranks, and this "
            f"run has {world_size}; use shard {rest} or auto."
        )
    return Layout(replicate=config.replicate, shard=rest, ring=config.ring, ulysses=config.ulysses)


def check_layout(layout: Layout, work: Work) -> None:
    """Refuse what could not be computed, or not exactly."""
    _check_heads(layout.ulysses, work)
    _check_ring(layout, work)
    ranks, per_rank = layout.sequence_ranks, 2 if layout.ring > 1 else 1
    if work.context_length < ranks * per_rank:
        raise ConfigError(
            f"parallel: a context of {format_size(work.context_length)} tokens has less than one for each of "
            f"ring × ulysses = {ranks} ranks; use at most {work.context_length // per_rank} of them."
        )
    micro_batches = work.batch_tokens // work.micro_batch_tokens
    if micro_batches % layout.data_ranks:
        unit = work.micro_batch_tokens * layout.data_ranks
        fitting = f"batch_tokens to {format_size(unit * -(-work.batch_tokens // unit))}"
        raise ConfigError(
            f"parallel: a step of {micro_batches} micro-batches ({format_size(work.micro_batch_tokens)} tokens each) "
            "does not "
            f"divide among replicate × shard = {layout.data_ranks} groups of ranks; set {fitting}, or let more ranks "
            "share a row by ulysses or ring."
        )


def fits_heads(degree: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether so many ranks get equally many query heads, and whole KV heads or one that others share."""
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
            f"{work.kv_heads_at_once} (of {heads}); set that to {_listed(several)}, or ulysses to {_listed(fitting)}."
        )
    raise ConfigError(
        f"parallel: ulysses={degree} does not fit {heads}, which must divide evenly among the ranks; use "
        f"{_listed(fitting)}, and ring for more ranks than heads allow."
    )


def _check_ring(layout: Layout, work: Work) -> None:
    if layout.ring == 1:
        return
    if work.document_masks:
        raise ConfigError(
            f"parallel: ring={layout.ring} passes keys to all later tokens of a row, whatever document they are of, "
            "and this stage's documents see only themselves; use ring 1 and ulysses, or attention: full."
        )
    if work.micro_batch_tokens != work.context_length:
        raise ConfigError(
            f"parallel: ring={layout.ring} computes one row at a time, and "
            f"micro_batch_tokens={format_size(work.micro_batch_tokens)} "
            f"holds {work.micro_batch_tokens // work.context_length}; set micro_batch_tokens to "
            f"{format_size(work.context_length)} or leave it out."
        )


def _parts(num_kv_heads: int, at_once: int | None) -> set[int]:
    """Sizes of the parts in which attention takes KV heads."""
    at_once = min(at_once or num_kv_heads, num_kv_heads)
    return {at_once, num_kv_heads % at_once} - {0}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _listed(values: list[int]) -> str:
    *others, last = values
    return f"{', '.join(map(str, others))} or {last}" if others else str(last)
