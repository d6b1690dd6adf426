"""Find the fastest settings of a stage that fit a machine.

Settings are tried in this order until something fits: those that change no result (memory settings, layouts), cheaper
optimizer settings, weights in host memory (several devices). Proposals and the recipe's own settings are estimated by
the same arithmetic, so planning again with a proposal gives the same answer.
"""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import GPUS, Gpu, Shape
from unspool.planning.footprint import Footprint, StepSetup, footprint, reserve
from unspool.planning.step_time import DeviceSpeed, Documents, StepSeconds, device_speed, step_seconds
from unspool.recipe.launch import check_stage
from unspool.recipe.load import LoadedRecipe
from unspool.recipe.yaml_lines import CoreDumper
from unspool.training.config import StageConfig
from unspool.training.parallel.config import Layout, divisors, fits_heads

GIB = 1 << 30
TILE = 16 << 10
# Share of host memory for tensors; the rest is for processes and files.
HOST_SHARE = 0.8
HOST_ASSUMED = 128 * GIB  # per GPU, without --host-mem
NODE = 8  # GPUs per machine
# Smaller savings of step time do not justify a change of settings.
MIN_SAVING = 0.02
# From this size on, tensors reach 2³¹ elements.
MANY_TOKENS = 512 << 10


@dataclass(frozen=True, kw_only=True)
class Machine:
    gpu: Gpu
    count: int
    host: float | None = None  # bytes of one machine's memory
    # GB/s that a GPU reaches to the others of its machine, and to other machines; None: from data sheets.
    link: float | None = None
    network: float | None = None

    @property
    def has_given_links(self) -> bool:
        return self.link is not None or self.network is not None

    @property
    def speed(self) -> DeviceSpeed:
        speed = device_speed(self.gpu)
        inside = speed.links.inside if self.link is None else 1e9 * self.link
        between = speed.links.between if self.network is None else 1e9 * self.network
        return replace(speed, links=replace(speed.links, inside=inside, between=between))

    @property
    def room(self) -> float:
        """Return the bytes for tensors on each device."""
        return self.gpu.memory - reserve(self.gpu.memory)

    @property
    def host_room(self) -> float:
        """Return the bytes for tensors in each device's share of host memory."""
        if self.gpu.is_cpu:
            return self.room
        whole = HOST_ASSUMED if self.host is None else self.host / min(self.count, NODE)
        return HOST_SHARE * whole


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs that are the same for all settings."""

    loaded: LoadedRecipe
    values: Mapping[str, Any]  # the model's config
    shape: Shape
    docs: Documents  # documents of the mix, per token
    speed: DeviceSpeed
    machine: Machine
    activations: float = 1.0  # measured ÷ computed bytes of everything that grows with tokens


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
        host = self.footprint.on_host
        if self.machine.gpu.is_cpu:  # host and device share one memory
            return self.device_bytes + host.states + host.activations <= self.machine.room
        return self.device_bytes <= self.machine.room and host.needed <= self.machine.host_room

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all devices."""
        return self.stage.batch_tokens / self.seconds.step

    @property
    def hours(self) -> float:
        return self.stage.steps * self.seconds.step / 3600


def estimate(case: Case, stage: StageConfig) -> Estimate:
    """Estimate memory and time of a stage; ConfigError if it cannot be distributed over the machine's devices."""
    layout = check_stage(case.loaded, stage, case.values, case.machine.count)
    is_single = case.machine.count == 1
    stage.memory.check_layers(case.shape.num_layers)
    problem = stage.loss.problem(stage.context_length, stage.parallel)
    if problem is not None:
        raise ConfigError(f"stage {stage.name}: {problem}.")
    if stage.precision == "fp8" and not case.machine.gpu.has_fp8:
        raise ConfigError(
            f"stage {stage.name}: precision fp8 needs a GPU of compute capability 8.9 or newer, and the "
            f"{case.machine.gpu.title} is older; set precision to bf16."
        )
    setup = StepSetup(
        tokens=-(-stage.tokens_per_pass // layout.sequence_ranks),
        micro_batches=stage.batch_tokens // stage.tokens_per_pass // layout.data_ranks,
        policy=stage.memory,
        optimizer=stage.optimizer,
        compiled=stage.compile,
        fp8_layers=max(0, case.shape.num_layers - 2 * stage.bf16_layers) if stage.precision == "fp8" else 0,
        forward_only=forward_only(stage, case.docs.of(stage.tokens_per_pass)),
        layout=layout,
        on_host=stage.parallel.offload and not is_single,
        on_cpu=case.machine.gpu.is_cpu,
    )
    found = _correct(footprint(case.shape, setup), case.activations)
    seconds = step_seconds(case.shape, setup, case.docs.of(stage.tokens_per_pass), case.speed)
    return Estimate(stage=stage, layout=layout, footprint=found, seconds=seconds, machine=case.machine)


def forward_only(stage: StageConfig, docs: Documents) -> tuple[float, float]:
    """Return the tokens that run forward to weigh the labels of `docs`, and their summed squared lengths."""
    tokens, squares = stage.loss.forward_only(docs.mean, stage.context_length)
    number = docs.tokens / docs.mean
    return number * tokens, number * squares


def _correct(found: Footprint, factor: float) -> Footprint:
    """Correct the parts that grow with tokens by a measured factor."""
    parts = {name: getattr(found, name) * factor for name in ("checkpoints", "kept", "layer", "batch")}
    return replace(found, **parts)


def fastest(case: Case, stage: StageConfig) -> Estimate | None:
    """Return the fastest settings that fit; None if none do."""
    for candidates in (_same_results(case, stage), _other_optimizers(case, stage), _on_host(case, stage)):
        found = [one for one in candidates if one.fits]
        if found:
            return _nearest(found, stage)
    return None


def changes(old: StageConfig, new: StageConfig) -> dict[str, Any]:
    """Return the keys of a stage that differ, as `--set` paths below the stage."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key in after:
        if isinstance(after[key], dict) and isinstance(before[key], dict):
            found |= {f"{key}.{inner}": value for inner, value in after[key].items() if before[key].get(inner) != value}
        elif after[key] != before[key]:
            found[key] = after[key]
    return found


def _nearest(found: list[Estimate], stage: StageConfig) -> Estimate:
    """Among settings about as fast as the fastest, return the one with the fewest changes.

    A ring is chosen only if nothing else fits, because its waiting times have not been measured.
    """
    ring = min(one.layout.ring for one in found)
    without = [one for one in found if one.layout.ring == ring]
    best = min(one.seconds.step for one in without)
    close = [one for one in without if one.seconds.step <= best * (1 + MIN_SAVING)]
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
            # If this does not fit on the device, nothing does.
            if leanest.device_bytes <= case.machine.room:
                yield from _policies(case, spread)


def _other_optimizers(case: Case, stage: StageConfig) -> Iterator[Estimate]:
    whole = stage.tokens_per_pass == stage.batch_tokens
    for optimizer in stage.optimizer.alternatives():
        if optimizer.step == "in-backward" and (not whole or "skip" in (stage.guard.nan, stage.guard.spike)):
            continue
        if case.machine.count > 1 and optimizer.sharding_problem() is not None:
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
    """Yield layouts: as written, and all degrees of Ulysses and ring that divide the devices."""
    count, written = case.machine.count, stage.parallel
    yield written
    rest = count // written.replicate if count % written.replicate == 0 else 0
    for ulysses in divisors(rest):
        if not fits_heads(ulysses, case.shape.num_heads, case.shape.num_kv_heads):
            continue
        for ring in divisors(rest // ulysses):
            changed = written.model_copy(update={"shard": "auto", "ulysses": ulysses, "ring": ring})
            if changed != written:
                yield changed


def _policies(case: Case, stage: StageConfig) -> Iterator[Estimate]:
    """Yield estimates of all memory settings; settings that keep products use as many layers as fit."""
    yield estimate(case, stage)
    for policy in _plain_policies(case, stage):
        yield estimate(case, _with(stage, policy))
    for offload in (False, True):
        yield from _keeping(case, stage, offload=offload)


def _leanest(case: Case, stage: StageConfig) -> MemoryPolicy:
    """Return the policy that needs the least device memory."""
    *_, last = (policy for policy in _plain_policies(case, stage) if policy.layers_per_checkpoint == 1)
    return last


def _plain_policies(case: Case, stage: StageConfig) -> Iterator[MemoryPolicy]:
    tokens = stage.tokens_per_pass
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
    """Keep matrix products in as many layers as fit, some of them in host memory."""
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


# Alternatives for a stage that does not fit


MAX_GPUS = 1024
SIZE_KEYS = {"context_length", "batch_tokens", "micro_batch_tokens", "mlp_tiles"}


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Settings or a machine that would fit."""

    kind: str  # settings | gpus | gpu | host | context
    text: str
    arguments: tuple[str, ...]  # to add to `unspool plan RECIPE`; empty if the recipe itself must change
    estimate: Estimate


def set_arguments(index: int, stage: StageConfig, chosen: StageConfig) -> list[str]:
    """`--set` arguments that turn the recipe's stage into the chosen one."""
    words = []
    for key, value in changes(stage, chosen).items():
        words += ["--set", f"stages.{index}.{key}={format_value(key, value)}"]
    return words


def format_value(key: str, value: Any) -> str:
    if key in SIZE_KEYS and isinstance(value, int):
        return format_size(value)
    text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True).strip()
    return text.removesuffix("...").strip()


def find_alternatives(case: Case, index: int, stage: StageConfig, chosen: Estimate | None) -> Iterator[Alternative]:
    """Yield settings for the given machine; if there are none, other machines and a shorter context length."""
    if chosen is not None:
        words = set_arguments(index, stage, chosen.stage)
        yield Alternative(kind="settings", text=shlex.join(words), arguments=tuple(words), estimate=chosen)
        return
    if not case.machine.gpu.is_cpu:
        yield from _more_gpus(case, index, stage)
    yield from _larger_gpu(case, index, stage)
    if not case.machine.gpu.is_cpu:
        yield from _more_host(case, index, stage)
    yield from _shorter(case, stage)


def _more_gpus(case: Case, index: int, stage: StageConfig) -> Iterator[Alternative]:
    count = 2 * case.machine.count
    while count <= MAX_GPUS:
        machine = replace(case.machine, count=count)
        if case.machine.host is not None:
            # A machine with as much memory per GPU.
            share = case.machine.host / min(case.machine.count, NODE)
            machine = replace(machine, host=share * min(count, NODE))
        found = _first_fit(replace(case, machine=machine), stage)
        if found is not None:
            words = ["--count", str(count), *_host_arguments(machine.host), *set_arguments(index, stage, found.stage)]
            yield Alternative(
                kind="gpus", text=f"{count} GPUs: {shlex.join(words)}", arguments=tuple(words), estimate=found
            )
            return
        count *= 2


def _larger_gpu(case: Case, index: int, stage: StageConfig) -> Iterator[Alternative]:
    for gpu in sorted(GPUS.values(), key=lambda one: one.gib):
        if gpu.gib <= case.machine.gpu.gib:
            continue
        machine = replace(case.machine, gpu=gpu)
        found = _first_fit(replace(case, machine=machine, speed=machine.speed), stage)
        if found is not None:
            words = ["--gpu", gpu.name, *set_arguments(index, stage, found.stage)]
            yield Alternative(
                kind="gpu", text=f"{gpu.title}: {shlex.join(words)}", arguments=tuple(words), estimate=found
            )
            return


def _more_host(case: Case, index: int, stage: StageConfig) -> Iterator[Alternative]:
    count = min(case.machine.count, NODE)
    for gib in (256, 512, 1024, 2048, 4096):
        machine = replace(case.machine, host=gib * GIB * count)
        if machine.host_room <= case.machine.host_room:
            continue
        found = _first_fit(replace(case, machine=machine), stage)
        if found is not None:
            needed = -(-found.footprint.on_host.needed * count / HOST_SHARE // GIB)
            words = ["--host-mem", f"{gib * count}G", *set_arguments(index, stage, found.stage)]
            text = f"{needed:.0f} GiB of host memory: {shlex.join(words)}"
            yield Alternative(kind="host", text=text, arguments=tuple(words), estimate=found)
            return


def _shorter(case: Case, stage: StageConfig) -> Iterator[Alternative]:
    """Yield a shorter context length. It needs shorter rows, so the recipe itself must change."""
    context = stage.context_length // 2
    while context >= 1024:
        if stage.batch_tokens % context == 0:
            shorter = stage.model_copy(update={"context_length": context, "micro_batch_tokens": None})
            docs = Documents(tokens=1.0, squares=min(case.docs.mean, context), windows=case.docs.windows)
            found = _first_fit(replace(case, docs=docs), shorter)
            if found is not None:
                text = f"a context length of {format_size(context)}, with rows of at most that length"
                yield Alternative(kind="context", text=text, arguments=(), estimate=found)
                return
        context //= 2


def _first_fit(case: Case, stage: StageConfig) -> Estimate | None:
    """Return the stage as written if it fits, else the fastest settings that fit."""
    try:
        written = estimate(case, stage)
    except ConfigError:
        written = None
    return written if written is not None and written.fits else fastest(case, stage)


def _host_arguments(host: float | None) -> list[str]:
    return [] if host is None else ["--host-mem", f"{host / GIB:.0f}G"]
