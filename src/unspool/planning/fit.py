"""Which settings of a stage fit a machine, and which of them are the fastest.

In: a stage, the shape of its model, its documents, a `Machine`. Out: an `Estimate` of the stage as it is written, and
of the fastest settings that fit.
Promise: a layout is refused here exactly where `check_layout` refuses it; what is chosen has been estimated by the
same arithmetic as what is written, so that planning again with it says the same.
Tried are, in this order, until something fits: what changes no result (memory settings, layouts); how weights and
moments are kept (one device); weights in host memory (several).
Elsewhere: bytes and seconds (train/cost_memory.py, train/cost_time.py), other machines (plan_refusal.py).
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import GPUS, Gpu, Shape
from unspool.planning.footprint import Footprint, Held, footprint, reserve
from unspool.planning.step_time import Documents, Pace, StepSeconds, pace_of, step_seconds
from unspool.recipe.launch import work_of
from unspool.recipe.load import LoadedRecipe
from unspool.recipe.yaml_lines import CoreDumper
from unspool.training.config import StageConfig
from unspool.training.parallel.config import Layout, check_layout, fits_heads, settle_layout

GIB = 1 << 30
TILE = 16 << 10
# Of host memory, what checkpoints may take; the rest is for processes and files.
HOST_SHARE = 0.8
HOST_ASSUMED = 128 * GIB  # for each GPU, where --host-mem is not given
NODE = 8  # GPUs of a machine
# Settings are changed for no less than this share of a step's time.
WORTH = 0.02
# From here on tensors reach 2³¹ elements (docs/memory.md).
MANY_TOKENS = 512 << 10


@dataclass(frozen=True, kw_only=True)
class Machine:
    gpu: Gpu
    count: int
    host: float | None = None  # bytes of one machine's memory

    @property
    def room(self) -> float:
        """Bytes for tensors on each device."""
        return self.gpu.memory - reserve(self.gpu.memory)

    @property
    def host_room(self) -> float:
        """Bytes for each device's share of host memory."""
        whole = HOST_ASSUMED if self.host is None else self.host / min(self.count, NODE)
        return HOST_SHARE * whole


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage's surroundings, the same for all settings that are tried."""

    loaded: LoadedRecipe
    shape: Shape
    docs: Documents  # of one micro-batch of the mix, per token
    pace: Pace
    machine: Machine
    activations: float = 1.0  # measured bytes ÷ those computed, of all that grows with tokens


@dataclass(frozen=True, kw_only=True)
class Estimate:
    stage: StageConfig
    layout: Layout
    footprint: Footprint
    seconds: StepSeconds
    machine: Machine

    @property
    def device_bytes(self) -> float:
        return self.footprint.device

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.machine.room and self.footprint.host <= self.machine.host_room

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.stage.batch_tokens / self.seconds.step

    @property
    def hours(self) -> float:
        return self.stage.steps * self.seconds.step / 3600


def estimate(case: Case, stage: StageConfig) -> Estimate:
    """ConfigError where the stage cannot be spread over so many devices."""
    layout = settle_layout(stage.parallel, case.machine.count)
    heads = (case.shape.num_heads, case.shape.num_kv_heads)
    check_layout(layout, work_of(case.loaded, stage, heads))
    alone = case.machine.count == 1
    problem = None if alone else stage.optimizer.sharding_problem()
    if problem is not None:
        raise ConfigError(problem)
    stage.memory.check_layers(case.shape.num_layers)
    micro_batch = stage.micro_batch_tokens or stage.context_length
    held = Held(
        tokens=-(-micro_batch // layout.sequence_ranks),
        micro_batches=stage.batch_tokens // micro_batch // layout.data_ranks,
        policy=stage.memory,
        optimizer=stage.optimizer,
        compiled=stage.compile,
        layout=layout,
        on_host=stage.parallel.offload and not alone,
    )
    found = corrected(footprint(case.shape, held), case.activations)
    seconds = step_seconds(case.shape, held, case.docs.of(micro_batch), case.pace)
    return Estimate(stage=stage, layout=layout, footprint=found, seconds=seconds, machine=case.machine)


def corrected(found: Footprint, factor: float) -> Footprint:
    """With what a measured run has shown of the parts that grow with tokens."""
    parts = {name: getattr(found, name) * factor for name in ("checkpoints", "kept", "layer", "batch")}
    return replace(found, **parts)


def fastest(case: Case, stage: StageConfig) -> Estimate | None:
    """The fastest settings that fit; None if none do."""
    for candidates in (_same_results(case, stage), _other_optimizers(case, stage), _on_host(case, stage)):
        found = [one for one in candidates if one.fits]
        if found:
            return _nearest(found, stage)
    return None


def changes(old: StageConfig, new: StageConfig) -> dict[str, Any]:
    """Stage keys that differ, as `--set` paths below the stage."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key in after:
        if isinstance(after[key], dict) and isinstance(before[key], dict):
            found |= {f"{key}.{inner}": value for inner, value in after[key].items() if before[key].get(inner) != value}
        elif after[key] != before[key]:
            found[key] = after[key]
    return found


def _nearest(found: list[Estimate], stage: StageConfig) -> Estimate:
    """Of those that are about as fast as the fastest, the one with the fewest changes.

    A ring is taken only where nothing else fits: links and waiting can spoil it, and neither is measured.
    """
    ring = min(one.layout.ring for one in found)
    without = [one for one in found if one.layout.ring == ring]
    best = min(one.seconds.step for one in without)
    close = [one for one in without if one.seconds.step <= best * (1 + WORTH)]
    return min(close, key=lambda one: (len(changes(stage, one.stage)), one.seconds.step))


def _same_results(case: Case, stage: StageConfig) -> Iterator[Estimate]:
    micro_batches = dict.fromkeys((stage.micro_batch_tokens, None))
    for micro_batch in micro_batches:
        for parallel in _parallels(case, stage):
            spread = stage.model_copy(update={"parallel": parallel, "micro_batch_tokens": micro_batch})
            try:
                leanest = estimate(case, _with(spread, _leanest(case, spread)))
            except ConfigError:
                continue
            # Where this does not fit on the device, nothing does.
            if leanest.device_bytes <= case.machine.room:
                yield from _policies(case, spread)


def _other_optimizers(case: Case, stage: StageConfig) -> Iterator[Estimate]:
    if case.machine.count > 1:
        return
    whole = (stage.micro_batch_tokens or stage.context_length) == stage.batch_tokens
    for optimizer in stage.optimizer.alternatives():
        if optimizer.step == "in-backward" and (not whole or "skip" in (stage.guard.nan, stage.guard.spike)):
            continue
        found = [one for one in _same_results(case, stage.model_copy(update={"optimizer": optimizer})) if one.fits]
        yield from found
        if found:
            return


def _on_host(case: Case, stage: StageConfig) -> Iterator[Estimate]:
    if case.machine.count > 1 and not stage.samples:
        parallel = stage.parallel.model_copy(update={"offload": True})
        yield from _same_results(case, stage.model_copy(update={"parallel": parallel}))


def _parallels(case: Case, stage: StageConfig) -> Iterator[Any]:
    """Ways to spread a stage: as it is written, and all degrees of Ulysses and ring that divide the devices."""
    count, written = case.machine.count, stage.parallel
    yield written
    rest = count // written.replicate if count % written.replicate == 0 else 0
    for ulysses in _divisors(rest):
        if not fits_heads(ulysses, case.shape.num_heads, case.shape.num_kv_heads):
            continue
        for ring in _divisors(rest // ulysses):
            changed = written.model_copy(update={"shard": "auto", "ulysses": ulysses, "ring": ring})
            if changed != written:
                yield changed


def _policies(case: Case, stage: StageConfig) -> Iterator[Estimate]:
    """Memory settings from the fastest on; of a number of kept layers the largest that fits."""
    yield estimate(case, stage)
    for policy in _plain_policies(case, stage):
        yield estimate(case, _with(stage, policy))
    for offload in (False, True):
        yield from _keeping(case, stage, offload=offload)


def _leanest(case: Case, stage: StageConfig) -> MemoryPolicy:
    """What holds the least on the device."""
    *_, last = (policy for policy in _plain_policies(case, stage) if policy.layers_per_checkpoint == 1)
    return last


def _plain_policies(case: Case, stage: StageConfig) -> Iterator[MemoryPolicy]:
    tokens = stage.micro_batch_tokens or stage.context_length
    tiles = (None, TILE) if tokens > TILE else (None,)
    heads = case.shape.num_kv_heads
    parts = (None, max(1, heads // 4)) if tokens >= MANY_TOKENS and heads > 1 else (None,)
    yield MemoryPolicy()
    for recompute in ("keep-attention", "full"):
        for offload in (False, True):
            for every in (1, 2, 4) if offload else (1,):
                for tile in tiles:
                    for at_once in parts:
                        yield MemoryPolicy(
                            activation_checkpointing=recompute,
                            layers_per_checkpoint=every,
                            offload=offload,
                            mlp_tiles=tile,
                            attention_heads_at_once=at_once,
                        )


def _keeping(case: Case, stage: StageConfig, *, offload: bool) -> Iterator[Estimate]:
    """Products kept in as many layers as fit, some of them in host memory."""
    layers = case.shape.num_layers
    for share in (0.0, 0.25, 0.5):
        low, high = 0, layers
        best = None
        while low < high:
            middle = (low + high + 1) // 2
            policy = MemoryPolicy(
                activation_checkpointing="keep-attention",
                offload=offload,
                keep_products=middle,
                keep_on_host=int(share * middle),
            )
            tried = estimate(case, _with(stage, policy))
            if tried.fits:
                low, best = middle, tried
            else:
                high = middle - 1
        if best is not None:
            yield best


def _with(stage: StageConfig, policy: MemoryPolicy) -> StageConfig:
    return stage.model_copy(update=vars(policy))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# What would fit where a stage does not: other settings, more GPUs, larger ones, more host memory, a shorter context.


MOST_GPUS = 1024
SIZES = {"context_length", "batch_tokens", "micro_batch_tokens", "mlp_tiles"}


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
    context = stage.context_length // 2
    while context >= 1024:
        if stage.batch_tokens % context == 0:
            shorter = stage.model_copy(update={"context_length": context, "micro_batch_tokens": None})
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
