"""What would fit where a stage does not: other settings, more GPUs, larger ones, more host memory, a shorter context.

In: a stage that does not fit as it is written. Out: `Way`s, nearest first, each with the words to add to the command.
Promise: a way with arguments has been planned, and `plan` accepts it.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from unspool.base.errors import ConfigError
from unspool.base.sizes import format_size
from unspool.recipes.lines import CoreDumper
from unspool.recipes.plan_fit import GIB, HOST_SHARE, NODE, Case, Estimate, changes, estimate, fastest
from unspool.train.config import StageConfig
from unspool.train.cost_gpus import GPUS
from unspool.train.cost_time import pace_of

MOST_GPUS = 1024
SIZES = {"context", "batch", "micro_batch", "mlp_tiles"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """Something that would fit."""

    kind: str  # settings | gpus | gpu | host | context
    text: str
    arguments: tuple[str, ...]  # to add to `unspool plan RECIPE`; none where the recipe itself has to change
    estimate: Estimate


def set_words(index: int, stage: StageConfig, chosen: StageConfig) -> list[str]:
    """`--set` words that turn the recipe's stage into the chosen one."""
    words = []
    for key, value in changes(stage, chosen).items():
        words += ["--set", f"stages.{index}.{key}={spelled(key, value)}"]
    return words


def spelled(key: str, value: Any) -> str:
    if key in SIZES and isinstance(value, int):
        return format_size(value)
    text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True).strip()
    return text.removesuffix("...").strip()


def ways_out(case: Case, index: int, stage: StageConfig, chosen: Estimate | None) -> Iterator[Way]:
    """The stage's own machine first; where nothing fits there, other machines."""
    if chosen is not None:
        words = set_words(index, stage, chosen.stage)
        yield Way(kind="settings", text=shlex.join(words), arguments=tuple(words), estimate=chosen)
        return
    yield from _more_gpus(case, index, stage)
    yield from _larger_gpu(case, index, stage)
    yield from _more_host(case, index, stage)
    yield from _shorter(case, stage)


def _more_gpus(case: Case, index: int, stage: StageConfig) -> Iterator[Way]:
    count = 2 * case.machine.count
    while count <= MOST_GPUS:
        machine = replace(case.machine, count=count)
        if case.machine.host is not None:
            # A machine with as much memory for each GPU.
            share = case.machine.host / min(case.machine.count, NODE)
            machine = replace(machine, host=share * min(count, NODE))
        found = _found(replace(case, machine=machine), stage)
        if found is not None:
            words = ["--count", str(count), *_host_words(machine.host), *set_words(index, stage, found.stage)]
            yield Way(kind="gpus", text=f"{count} of them: {shlex.join(words)}", arguments=tuple(words), estimate=found)
            return
        count *= 2


def _larger_gpu(case: Case, index: int, stage: StageConfig) -> Iterator[Way]:
    for gpu in sorted(GPUS.values(), key=lambda one: one.gib):
        if gpu.gib <= case.machine.gpu.gib:
            continue
        machine = replace(case.machine, gpu=gpu)
        found = _found(replace(case, machine=machine, pace=pace_of(gpu)), stage)
        if found is not None:
            words = ["--gpu", gpu.name, *set_words(index, stage, found.stage)]
            yield Way(kind="gpu", text=f"{gpu.title}: {shlex.join(words)}", arguments=tuple(words), estimate=found)
            return


def _more_host(case: Case, index: int, stage: StageConfig) -> Iterator[Way]:
    count = min(case.machine.count, NODE)
    for gib in (256, 512, 1024, 2048, 4096):
        machine = replace(case.machine, host=gib * GIB * count)
        if machine.host_room <= case.machine.host_room:
            continue
        found = _found(replace(case, machine=machine), stage)
        if found is not None:
            needed = -(-found.footprint.host * count / HOST_SHARE // GIB)
            words = ["--host-mem", f"{gib * count}G", *set_words(index, stage, found.stage)]
            text = f"{needed:.0f} GiB of host memory: {shlex.join(words)}"
            yield Way(kind="host", text=text, arguments=tuple(words), estimate=found)
            return


def _shorter(case: Case, stage: StageConfig) -> Iterator[Way]:
    """Rows would have to be made as short, so that this is for the recipe's author to do."""
    context = stage.context // 2
    while context >= 1024:
        if stage.batch % context == 0:
            shorter = stage.model_copy(update={"context": context, "micro_batch": None})
            found = _found(replace(case, docs=replace(case.docs, squares=min(case.docs.mean, context))), shorter)
            if found is not None:
                text = f"a context of {format_size(context)}, with rows no longer than that"
                yield Way(kind="context", text=text, arguments=(), estimate=found)
                return
        context //= 2


def _found(case: Case, stage: StageConfig) -> Estimate | None:
    """As it is written if that fits, else the nearest that does."""
    try:
        written = estimate(case, stage)
    except ConfigError:
        written = None
    return written if written is not None and written.fits else fastest(case, stage)


def _host_words(host: float | None) -> list[str]:
    return [] if host is None else ["--host-mem", f"{host / GIB:.0f}G"]
