"""A plan on other numbers of GPUs: tokens per second, MFU and memory of the settings that `plan` chooses for each."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from unspool.core.sizes import format_size
from unspool.planning.fit import GIB, Machine
from unspool.planning.origins import describe_links, number_origins
from unspool.planning.recipe_plan import Plan, StagePlan, plan_recipe
from unspool.training.parallel.config import Layout


@dataclass(frozen=True, kw_only=True)
class Projection:
    """One stage on some number of GPUs."""

    stage: str
    context_length: int
    batch_tokens: int
    gpus: int
    layout: Layout
    settings: dict[str, Any]  # of memory, those that differ from the defaults
    peak_gib: float
    step_seconds: float
    waiting_seconds: float  # of the step, for other ranks
    tokens_per_second: float  # per GPU
    mfu: float
    origins: dict[str, str]  # by number, see origins.py


def project(plan: Plan, gpus: Sequence[int]) -> Iterator[Projection]:
    """Plan the recipe again for each number of GPUs, with the same host memory per GPU; skip what does not fit."""
    for count in gpus:
        machine = replace(plan.machine, count=count, host=_host(plan.machine, count))
        again = plan_recipe(plan.loaded, machine, model=plan.model_from, measured=plan.measured)
        yield from (_projection(again, stage) for stage in again.stages if stage.chosen is not None)


def _host(machine: Machine, count: int) -> float | None:
    node = machine.speed.links.node
    return None if machine.host is None else machine.host / min(machine.count, node) * min(count, node)


def _projection(plan: Plan, planned: StagePlan) -> Projection:
    chosen, mfu = planned.chosen, planned.mfu
    assert chosen is not None and mfu is not None, "stages that do not fit were skipped"
    memory = {name: value for name, value in asdict(chosen.stage.memory).items() if value not in (None, False, 0)}
    return Projection(
        stage=chosen.stage.name,
        context_length=chosen.stage.context_length,
        batch_tokens=chosen.stage.batch_tokens,
        gpus=plan.machine.count,
        layout=chosen.layout,
        settings={name: value for name, value in memory.items() if (name, value) != ("layers_per_checkpoint", 1)},
        peak_gib=chosen.device_bytes / GIB,
        step_seconds=chosen.seconds.step,
        waiting_seconds=chosen.seconds.waiting,
        tokens_per_second=chosen.tokens_per_second / plan.machine.count,
        mfu=mfu,
        origins=number_origins(chosen, plan.measured),
    )


def assumptions(plan: Plan) -> list[str]:
    """Return what a projection assumes, one sentence each."""
    batches = sorted({stage.stage.batch_tokens for stage in plan.stages})
    return [
        f"Rates of one GPU: {plan.rates}.",
        f"Bandwidths: {describe_links(replace(plan.machine, count=2))}; the same for any number of machines.",
        "Gathering weights overlaps with all computation. A ring's keys and values overlap with the backward pass of "
        "attention. The exchanges of Ulysses overlap with nothing.",
        "All ranks are equally fast and have rows of equal cost: no stragglers, checkpoints, restarts or loading.",
        f"A step has {', '.join(format_size(size) for size in batches)} tokens on any number of GPUs.",
    ]
