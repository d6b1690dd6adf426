"""The plan of a recipe: data, memory, time and settings of each stage, before anything runs.

Nothing is written and no weights are read. For a stage that does not fit as written, the plan lists alternatives that
fit.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console

from unspool.core.console import PlainConsole
from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.mixture import ModelShape, arrange, imbalance
from unspool.planning.calibration import Calibration
from unspool.planning.cost import GPUS
from unspool.planning.fit import (
    GIB,
    MIN_SAVING,
    Alternative,
    Case,
    Estimate,
    Machine,
    changes,
    estimate,
    fastest,
    find_alternatives,
    forward_only,
    set_arguments,
)
from unspool.planning.footprint import PARTS
from unspool.planning.origins import LEGEND, number_origins, plain_links
from unspool.planning.plan_text import print_plan
from unspool.planning.recipe_inputs import DataPlan, DatasetUse, PlannedModel, documents_of, plan_data, planned_model
from unspool.planning.step_time import Documents, documents, flops_per_token, forward_flops
from unspool.recipe.load import LoadedRecipe
from unspool.rope.bound import bound, first_negative
from unspool.rope.tables import RopeShape, config_frequencies, format_base
from unspool.rope.tables import shape_of as rope_of
from unspool.training.config import ReportedHours, StageConfig
from unspool.training.parallel.config import Layout

LOOK_AHEAD = 4
DRAWN = 100


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    stage: StageConfig
    index: int
    flops_per_token: float
    written: Estimate | None  # None: it cannot be distributed over these devices
    problem: str | None  # the reason why it does not fit as written
    chosen: Estimate | None  # the stage as written if it fits, else settings that fit this machine
    faster: Estimate | None  # faster settings with the same results
    alternatives: tuple[Alternative, ...]
    rope: tuple[str, ...]
    reported: "ReportedSpeed | None" = None  # of the paper, if the stage has `reported`
    weighing_flops: float = 0.0  # per token, of the forward passes that weigh labels; not in `flops_per_token`
    waiting: float = 1.0  # step ÷ planned step if ranks wait for ranks with longer documents; not in the plan's time

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def mfu(self) -> float | None:
        if self.chosen is None:
            return None
        machine = self.chosen.machine
        peak = machine.gpu.tflops * 1e12 * machine.count
        return self.flops_per_token * self.chosen.tokens_per_second / peak


@dataclass(frozen=True, kw_only=True)
class ReportedSpeed:
    """A paper's hours as speeds, which can be compared for any model."""

    hours: ReportedHours
    tokens_per_second: float  # per GPU
    mfu: float | None  # None for an unknown GPU
    full_mfu: float | None  # if every row cost as much as one document that fills it


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Resources of a recipe, and settings of its stages that fit."""

    loaded: LoadedRecipe
    model: PlannedModel
    machine: Machine
    rates: str  # origin of the rates
    data: DataPlan
    stages: tuple[StagePlan, ...]
    price: float | None = None  # of a GPU hour
    model_from: str | None = None  # where the model's config was read, if the recipe's model is missing
    measured: Calibration | None = None

    def on_links(self, *, inside: float | None = None, between: float | None = None) -> "Plan":
        """Plan again for links of other bandwidths: GB/s that a GPU reaches inside its machine, and between machines.

        A bandwidth that is not given stays as it is. Raises ConfigError if one is not above 0.

        Example:
            >>> import unspool
            >>> plan = unspool.plan("tiny", gpu="h100").on_links(inside=200)
            >>> plan.fits
            True
        """
        for name, value in (("inside", inside), ("between", between)):
            if value is not None and not value > 0:
                raise ConfigError(f"`{name}={value!r}`: a bandwidth must be above 0 GB/s.")
        machine = self.machine
        machine = replace(
            machine,
            link=machine.link if inside is None else inside,
            network=machine.network if between is None else between,
        )
        found = plan_recipe(self.loaded, machine, model=self.model_from, measured=self.measured)
        return replace(found, price=self.price)

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def hours(self) -> float | None:
        """Return the hours of all stages; None if some stage does not fit."""
        found = [stage.chosen.hours for stage in self.stages if stage.chosen is not None]
        return sum(found) if len(found) == len(self.stages) else None

    def refusals(self) -> list[str]:
        """Describe what does not fit as written, and what would; empty if all stages fit."""
        lines = []
        for planned in self.stages:
            if planned.problem is None:
                continue
            lines.append(f"stage {planned.stage.name} does not fit as written: {planned.problem.rstrip('.')}.")
            lines += [f"stage {planned.stage.name} fits with {one.text}" for one in planned.alternatives]
            if not planned.alternatives:
                lines.append(f"stage {planned.stage.name}: no settings fit; use a smaller model.")
        return lines

    def print(self, console: Console) -> None:
        print_plan(console, self)

    def __str__(self) -> str:
        out = io.StringIO()
        self.print(PlainConsole(file=out, width=120))
        return out.getvalue()

    __repr__ = __str__


def plan_recipe(
    loaded: LoadedRecipe,
    machine: Machine,
    *,
    model: str | None = None,
    measured: Calibration | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> Plan:
    found = planned_model(loaded, model)
    data = plan_data(loaded, found.windows)
    stages = []
    for index, stage in enumerate(loaded.recipe.stages):
        stages.append(_plan_stage(loaded, index, stage, machine, found, data, measured))
        advance(1)
    return Plan(
        loaded=loaded,
        model=found,
        machine=machine,
        rates=_rates(machine, measured),
        data=data,
        stages=tuple(stages),
        model_from=model,
        measured=measured,
    )


def _rates(machine: Machine, measured: Calibration | None) -> str:
    if measured is not None:
        return f"measured: {measured.summary}"
    if machine.gpu.is_cpu:
        return f"{machine.gpu.rates}, measured here for a second; measuring whole steps is more accurate"
    if machine.gpu.measured:
        links = "; communication between GPUs is modeled" if machine.count > 1 else ""
        return f"fitted to steps measured on one {machine.gpu.title}{links}"
    return f"estimated: rates of an H200, scaled by the data sheet of {machine.gpu.title}"


def _plan_stage(
    loaded: LoadedRecipe,
    index: int,
    stage: StageConfig,
    machine: Machine,
    model: PlannedModel,
    data: DataPlan,
    measured: Calibration | None,
) -> StagePlan:
    speed, activations = machine.speed, 1.0
    if measured is not None:
        speed, activations = measured.correct(speed), measured.activations
    docs = data.documents[stage.name]
    case = Case(
        loaded=loaded,
        values=model.values,
        shape=model.shape,
        docs=docs,
        speed=speed,
        machine=machine,
        activations=activations,
    )
    written, problem = _written(case, stage)
    best = fastest(case, stage)
    fitting = written if problem is None else None
    chosen = fitting or best
    faster = None
    if fitting and best and best.seconds.step < fitting.seconds.step * (1 - MIN_SAVING):
        faster = best if best.stage.optimizer == stage.optimizer else None
    return StagePlan(
        stage=stage,
        index=index,
        flops_per_token=flops_per_token(model.shape, docs),
        weighing_flops=_weighing_flops(model, stage, docs),
        written=written,
        problem=problem,
        chosen=chosen,
        faster=faster,
        alternatives=() if problem is None else tuple(find_alternatives(case, index, stage, best)),
        rope=tuple(rope_lines(model.values, stage, _rope_stage(loaded.recipe.stages, index))),
        reported=None if stage.reported is None else _reported(stage.reported, stage, model, docs),
        waiting=1.0 if chosen is None else _waiting(data.stages[stage.name], stage, model, chosen.layout),
    )


def _weighing_flops(model: PlannedModel, stage: StageConfig, docs: Documents) -> float:
    tokens, squares = forward_only(stage, docs)
    return forward_flops(model.shape, Documents(tokens=tokens, squares=squares, windows=docs.windows)) / docs.tokens


def _waiting(uses: Sequence[DatasetUse], stage: StageConfig, model: PlannedModel, layout: Layout) -> float:
    """Estimate step time ÷ step time with equal work on all ranks, over DRAWN steps of the mix."""
    groups, rows = layout.replicate * layout.shard, stage.batch_tokens // stage.context_length
    if groups == 1 or rows % groups:
        return 1.0
    shape = model.shape
    cost = ModelShape(
        num_layers=shape.num_layers, attention_width=shape.num_heads * shape.head_dim, num_params=shape.params
    )
    tokens = stage.context_length
    # A context holds rows of one dataset, and documents of one length cost tokens × length.
    costs = np.array([cost.linear * tokens + cost.quadratic * tokens * documents_of((use,)).mean for use in uses])
    true = np.array(
        [cost.linear * tokens + cost.quadratic * tokens * documents_of((use,), model.windows).per_layer for use in uses]
    )
    shares = np.array([use.share for use in uses])
    drawn = rng_for(0, "planned rows", stage.name).choice(len(uses), size=(DRAWN, rows), p=shares / shares.sum())
    # The loader arranges rows as if every layer had full attention.
    return float(np.mean([imbalance(true[step], arrange(costs[step], groups))[1] for step in drawn]))


def _reported(hours: ReportedHours, stage: StageConfig, model: PlannedModel, docs: Documents) -> ReportedSpeed:
    speed = hours.tokens / (hours.gpu_hours * 3600)
    gpu = GPUS.get(hours.gpu.lower())

    def mfu(of: Documents) -> float | None:
        return None if gpu is None else speed * flops_per_token(model.shape, of) / (gpu.tflops * 1e12)

    full = documents([stage.context_length], docs.windows)
    return ReportedSpeed(hours=hours, tokens_per_second=speed, mfu=mfu(docs), full_mfu=mfu(full))


def _written(case: Case, stage: StageConfig) -> tuple[Estimate | None, str | None]:
    try:
        found = estimate(case, stage)
    except ConfigError as error:
        return None, str(error)
    return found, None if found.fits else _too_much(found)


def _too_much(found: Estimate) -> str:
    machine, held = found.machine, found.footprint
    whose = f"each {machine.gpu.name}" if machine.count > 1 else f"the {machine.gpu.name}"
    if held.device > machine.room:
        return (
            f"it needs {held.device / GIB:.1f} GiB of {whose} in {held.moment}, but {machine.room / GIB:.1f} of "
            f"{machine.gpu.gib:.1f} are free for tensors"
        )
    host = held.on_host
    what = "while the model is loaded" if host.loading > host.step else "in a step"
    return (
        f"it needs {host.needed / GIB:.1f} GiB of host memory for {whose} {what}, but {machine.host_room / GIB:.1f} "
        "are free; give the host memory of the machine"
    )


def _rope_stage(stages: Sequence[StageConfig], index: int) -> StageConfig:
    """Return the stage that sets the RoPE of stage `index`: itself, or an earlier stage if it changes nothing."""
    stage = stages[index]
    names = [earlier.name for earlier in stages[:index]]
    start = names[-1:] if stage.init == "previous" else [stage.init]
    if not stage.rope.keeps_frequencies or start not in ([name] for name in names):
        return stage
    return _rope_stage(stages, names.index(start[0]))


def rope_lines(values: dict[str, Any], stage: StageConfig, owner: StageConfig) -> list[str]:
    """Describe the stage's RoPE, set by `owner`, in one or two lines; `unspool rope` has details."""
    try:
        rope = rope_of(values)
    except ConfigError:
        return []
    context = stage.context_length
    if owner.rope.keeps_frequencies:
        frequencies = list(config_frequencies(values, context)[0])
    else:
        try:
            settled = owner.rope.resolve(rope, owner.context_length)
        except ConfigError as error:
            return [str(error)]
        frequencies = list(np.atleast_2d(settled.tables(rope, owner.context_length).inv_freq))
    reaches = [first_negative(line.astype(np.float64), LOOK_AHEAD * context) for line in frequencies]
    worst = min((reach for reach in reaches if reach is not None), default=None)
    far = f"over {format_size(LOOK_AHEAD * context)}" if worst is None else f"{worst:,}"
    verdict = "enough" if worst is None or worst >= context else f"short of {format_size(context)}"
    origin = "" if owner is stage else f", of stage {owner.name}"
    if stage.rope.attention_scale is not None:
        origin += ", attention scores scaled"
    lines = [f"{owner.rope.describe(rope)}{origin}: B(m) ≥ 0 up to {far} tokens (Men et al.), {verdict}"]
    if worst is not None and worst < context:
        lines.append(_smallest(rope, context))
    return lines


def _smallest(rope: RopeShape, context: int) -> str:
    smallest = bound(context, rope.rotary_dim)
    hint = f"the smallest single base that passes is {format_base(smallest)}" if smallest else "no single base passes"
    hint += " (larger ones may fail)" if smallest else ""
    return f"{hint}; see `unspool rope --context {format_size(context)}`"


# Plain data for --json


def as_plain(plan: Plan) -> dict[str, Any]:
    price = plan.price
    machine, hours = plan.machine, plan.hours
    gpu_hours = None if hours is None else hours * machine.count
    return {
        "recipe": plan.loaded.recipe.name,
        "fits": plan.fits,
        "machine": {
            "gpu": machine.gpu.name,
            "title": machine.gpu.title,
            "count": machine.count,
            "gib": machine.gpu.gib,
            "room_gib": machine.room / GIB,
            "host_room_gib": machine.host_room / GIB,
            "rates": plan.rates,
            "links": plain_links(machine) if machine.count > 1 or machine.has_given_links else None,
        },
        "origin_words": LEGEND,
        "model": {
            "origin": plan.model.origin,
            "parameters": plan.model.shape.params,
            **asdict(plan.model.shape),
            "windows": None if plan.model.windows is None else asdict(plan.model.windows),
        },
        "sources": [asdict(source) for source in plan.data.sources],
        "stages": [_plain_stage(plan, stage) for stage in plan.stages],
        "warnings": list(plan.data.warnings),
        "hours": hours,
        "gpu_hours": gpu_hours,
        "cost": None if price is None or gpu_hours is None else price * gpu_hours,
    }


def _plain_stage(plan: Plan, planned: StagePlan) -> dict[str, Any]:
    stage = planned.stage
    return {
        "name": stage.name,
        "context_length": stage.context_length,
        "tokens": stage.steps * stage.batch_tokens,
        "steps": stage.steps,
        "rows": [asdict(use) for use in plan.data.stages[stage.name]],
        "document_len": plan.data.documents[stage.name].mean,
        "lengths_counted": plan.data.lengths_are_counted(stage.name),
        "flops_per_token": planned.flops_per_token,
        "weighing_flops_per_token": planned.weighing_flops,
        "flops": planned.flops_per_token * stage.steps * stage.batch_tokens,
        "mfu": planned.mfu,
        "fits": planned.fits,
        "problem": planned.problem,
        "written": _plain_estimate(plan, planned, planned.written),
        "chosen": _plain_estimate(plan, planned, planned.chosen),
        "faster": _plain_estimate(plan, planned, planned.faster),
        "ways": [
            {"kind": one.kind, "text": one.text, "arguments": list(one.arguments), "hours": one.estimate.hours}
            for one in planned.alternatives
        ],
        "rope": list(planned.rope),
        "waiting": planned.waiting,
        "reported": None if planned.reported is None else _plain_reported(planned.reported),
    }


def _plain_reported(found: ReportedSpeed) -> dict[str, Any]:
    numbers = {"tokens_per_second": found.tokens_per_second, "mfu": found.mfu, "full_mfu": found.full_mfu}
    return {**found.hours.model_dump(mode="json"), **numbers}


def _plain_estimate(plan: Plan, planned: StagePlan, found: Estimate | None) -> Any:
    if found is None:
        return None
    stage, index, price = planned.stage, planned.index, plan.price
    gpu_hours = found.hours * found.machine.count
    return {
        "settings": changes(stage, found.stage),
        "set": set_arguments(index, stage, found.stage),
        "layout": asdict(found.layout),
        "memory": {
            "moment": found.footprint.moment,
            "parts": {part: getattr(found.footprint, part) for part in PARTS},
            "device": found.footprint.device,
            "host": found.footprint.host,
            "host_parts": asdict(found.footprint.on_host),
        },
        "fits": found.fits,
        "seconds": {**asdict(found.seconds), "step": found.seconds.step},
        "tokens_per_second": found.tokens_per_second,
        "hours": found.hours,
        "gpu_hours": gpu_hours,
        "cost": None if price is None else price * gpu_hours,
        "origins": number_origins(found, plan.measured),
    }
