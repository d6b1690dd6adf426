"""Which settings of a stage fit a machine, and which of them are the fastest.

In: a stage, the shape of its model, its documents, a `Machine`. Out: an `Estimate` of the stage as it is written, and
of the fastest settings that fit.
Promise: a layout is refused here exactly where `check_layout` refuses it; what is chosen has been estimated by the
same arithmetic as what is written, so that planning again with it says the same.
Tried are, in this order, until something fits: what changes no result (memory settings, layouts); how weights and
moments are kept (one device); weights in host memory (several).
Elsewhere: bytes and seconds (train/cost_memory.py, train/cost_time.py), other machines (plan_refusal.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from unspool.base.errors import ConfigError
from unspool.model.memory_policy import MemoryPolicy
from unspool.recipes.check import LoadedRecipe
from unspool.recipes.layouts import work_of
from unspool.train.config import StageConfig
from unspool.train.cost import Shape
from unspool.train.cost_gpus import Gpu
from unspool.train.cost_memory import Footprint, Held, footprint, reserve
from unspool.train.cost_time import Documents, Pace, StepSeconds, step_seconds
from unspool.train.optimizer_config import OptimizerConfig
from unspool.train.parallel_config import Layout, check_layout, fits_heads, settle_layout

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
LARGE_OPTIMIZERS = (
    {"states": "8bit"},
    {"weights": "bf16", "states": "8bit"},
    {"weights": "bf16", "states": "8bit", "step": "in-backward"},
)


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
        return self.stage.batch / self.seconds.step

    @property
    def hours(self) -> float:
        return self.stage.steps * self.seconds.step / 3600


def estimate(case: Case, stage: StageConfig) -> Estimate:
    """ConfigError where the stage cannot be spread over so many devices."""
    layout = settle_layout(stage.parallel, case.machine.count)
    heads = (case.shape.num_heads, case.shape.num_kv_heads)
    check_layout(layout, work_of(case.loaded, stage, heads))
    alone = case.machine.count == 1
    if not alone and stage.optimizer != OptimizerConfig():
        raise ConfigError("optimizer: several devices keep weights and moments in fp32 and step after; leave it out.")
    stage.memory.check_layers(case.shape.num_layers)
    micro_batch = stage.micro_batch or stage.context
    held = Held(
        tokens=-(-micro_batch // layout.sequence_ranks),
        micro_batches=stage.batch // micro_batch // layout.data_ranks,
        policy=stage.memory,
        weights=stage.optimizer.weights,
        states=stage.optimizer.states,
        in_backward=stage.optimizer.step == "in-backward",
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
    micro_batches = dict.fromkeys((stage.micro_batch, None))
    for micro_batch in micro_batches:
        for parallel in _parallels(case, stage):
            spread = stage.model_copy(update={"parallel": parallel, "micro_batch": micro_batch})
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
    whole = (stage.micro_batch or stage.context) == stage.batch
    for wanted in LARGE_OPTIMIZERS:
        if wanted.get("step") and (not whole or "skip" in (stage.guard.nan, stage.guard.spike)):
            continue
        optimizer = OptimizerConfig.model_validate(wanted)
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
    *_, last = (policy for policy in _plain_policies(case, stage) if policy.recompute_every == 1)
    return last


def _plain_policies(case: Case, stage: StageConfig) -> Iterator[MemoryPolicy]:
    tokens = stage.micro_batch or stage.context
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
                            recompute=recompute,
                            recompute_every=every,
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
                recompute="keep-attention", offload=offload, keep_products=middle, keep_on_host=int(share * middle)
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
