"""`unspool plan`: tokens, memory, time and settings of a recipe before it runs."""

import logging
import re
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.recipes import Override
from unspool.cli.run import RecipeArgument
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.core.host_memory import measure_host_memory
from unspool.core.progress import progress_bar
from unspool.core.sizes import format_count, format_size
from unspool.planning.cost import GPUS

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from rich.console import Console

    from unspool.planning.calibration import Calibration
    from unspool.planning.fit import Estimate, Machine
    from unspool.planning.recipe_plan import Plan, StagePlan
    from unspool.recipe.load import LoadedRecipe

GIB = 1 << 30
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([GT])i?B?", re.IGNORECASE)


def plan(
    recipe: RecipeArgument,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"Device to plan for: {', '.join(GPUS)}; this (machine's GPU, else its CPU) or cpu (this machine's). "
            "Default: the local GPU, else an H200."
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=65536, help="Number of GPUs.")] = 1,
    host_mem: Annotated[
        str | None,
        typer.Option(
            "--host-mem",
            help="Host memory of one machine, such as 512G or 1.9T. Default: this machine's if planning for its GPU, "
            "else 128G per GPU.",
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU hour, to print the cost.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hub id to read the model's config from, if the model itself is missing."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure a few steps on the local device first, and use their rates.")
    ] = False,
    overrides: Override = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Plan a recipe: tokens and epochs, memory, time, and settings that fit.

    Reads no weights and writes nothing (except with --measure). If a stage
    does not fit as written, prints settings that do and exits with code 2.
    Add them to the command and plan again.

        unspool plan smollm2-32k --gpu 4090

        unspool plan prolong-512k --gpu h100 --count 8 --host-mem 1.9T --price 2.5

        unspool plan my.yaml --measure              measure rates on the local GPU

        unspool plan tiny --gpu this --measure      or on this CPU, if there is none
    """
    from unspool.planning.recipe_plan import as_plain, plan_recipe
    from unspool.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides)
    machine = _machine(gpu, count, host_mem, here=measure)
    measured = _measured(loaded, machine, model) if measure else _saved(loaded, machine, model)
    with progress_bar("stages planned", len(loaded.recipe.stages)) as advance:
        found = plan_recipe(loaded, machine, model=model, measured=measured, advance=lambda done: advance(done))
    if as_json:
        print_json(as_plain(found, price))
    else:
        _print(found, price)
    if not found.fits:
        raise ConfigError("\n".join(_refusals(found)))


def _machine(gpu: str | None, count: int, host_mem: str | None, *, here: bool) -> "Machine":
    from unspool.planning.cost import REFERENCE, find_gpu
    from unspool.planning.fit import Machine
    from unspool.planning.local_machine import CPU, THIS, local_cpu, local_gpu

    host, name = _bytes(host_mem), (gpu or "").lower()
    if name == CPU or (name == THIS and local_gpu() is None):
        if count > 1:
            raise ConfigError(f"--gpu {gpu} plans for one process on this CPU; leave --count out.")
        if host is not None:
            raise ConfigError(f"--gpu {gpu} plans for this machine's own memory; leave --host-mem out.")
        return Machine(gpu=local_cpu(), count=1)
    own = local_gpu() if name in ("", THIS) or here else None
    if here and own is None:
        raise ConfigError("--measure needs a local GPU, and there is none; add --gpu this to measure on this CPU.")
    if here and name not in ("", THIS) and own is not None and find_gpu(name) != own:
        raise ConfigError(
            f"--measure uses the local {own.name}, so --gpu {gpu} cannot be combined with it; remove one of them."
        )
    if host is None and name in ("", THIS) and own is not None:
        memory = measure_host_memory()
        host = None if memory is None else float(memory.total)
    if own is None and not name:
        logger.info(
            f"no local GPU and no --gpu: planning for {REFERENCE.title}; --gpu this plans for this machine's CPU"
        )
    return Machine(gpu=own or (find_gpu(name) if name else REFERENCE), count=count, host=host)


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    match = _BYTES.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--host-mem {text!r} is not a size; use a number with G or T, such as 512G or 1.9T (powers of 1024)."
        )
    return float(match[1]) * (GIB if match[2].upper() == "G" else 1024 * GIB)


def _saved(loaded: "LoadedRecipe", machine: "Machine", model: str | None) -> "Calibration | None":
    from unspool.planning.calibration import FILE, load_calibration
    from unspool.planning.recipe_inputs import planned_model

    found = load_calibration(loaded.recipe.out)
    if found is None or not found.matches(machine.gpu.name, planned_model(loaded, model).shape):
        return None
    logger.info(f"using measured rates from {loaded.recipe.out / FILE}")
    return found


def _measured(loaded: "LoadedRecipe", machine: "Machine", model: str | None) -> "Calibration":
    import torch

    from unspool.planning.calibration import measure, save_calibration
    from unspool.planning.recipe_plan import plan_recipe

    first = plan_recipe(loaded, machine, model=model)
    longest = max(first.stages, key=lambda planned: planned.stage.context_length)
    stage = longest.chosen.stage if longest.chosen else longest.stage
    logger.info(f"measuring a few layers of stage {stage.name} on {machine.gpu.title}: six steps of a few seconds each")
    docs = first.data.documents[stage.name]
    device = torch.device("cpu" if machine.gpu.is_cpu else "cuda")
    found = measure(first.model.shape, stage, docs, machine.gpu, device)
    path = save_calibration(found, loaded.recipe.out)
    logger.info(f"wrote measured rates to {path}; later plans use them")
    return found


def _refusals(found: "Plan") -> list[str]:
    lines = []
    for planned in found.stages:
        if planned.problem is None:
            continue
        lines.append(f"stage {planned.stage.name} does not fit as written: {planned.problem.rstrip('.')}.")
        lines += [f"stage {planned.stage.name} fits with {one.text}" for one in planned.alternatives]
        if not planned.alternatives:
            lines.append(f"stage {planned.stage.name}: no settings fit; use a smaller model.")
    return lines


def _print(found: "Plan", price: float | None) -> None:

    console = PlainConsole()
    machine, shape = found.machine, found.model.shape
    console.print(f"{found.loaded.recipe.name} on {machine.count} × {machine.gpu.title}", style="bold", soft_wrap=True)
    console.print(f"model  {format_count(shape.params)} parameters ({found.model.origin})", soft_wrap=True)
    console.print(f"rates  {found.rates}", soft_wrap=True)
    console.print()
    _print_sources(console, found)
    for planned in found.stages:
        _print_stage(console, found, planned, price)
    for warning in found.data.warnings:
        console.print(warning, style="yellow", soft_wrap=True)
    if found.hours is not None and len(found.stages) > 1:
        console.print(f"\nall stages: {_time(found.hours, machine, price)}", style="bold")


def _print_sources(console: "Console", found: "Plan") -> None:
    table = _table("source", "has", "how it is known", "trained on", "epochs")
    for source in found.data.sources:
        amount = source.available
        has = "?" if amount.tokens is None else format_count(amount.tokens)
        table.add_row(source.name, has, f"{amount.how}: {amount.why}", format_count(source.tokens), _epochs(source))
    console.print(table)


def _print_stage(console: "Console", found: "Plan", planned: "StagePlan", price: float | None) -> None:
    stage, uses = planned.stage, found.data.stages[planned.stage.name]
    steps = f"{stage.steps} steps of {format_size(stage.batch_tokens)} at {format_size(stage.context_length)}"
    console.print(f"\nstage {stage.name}", style="bold", end="")
    console.print(f"  {steps}, {format_count(stage.steps * stage.batch_tokens)} tokens")
    table = _table("dataset", "share", "tokens", "epochs", "documents", "how lengths are known")
    for use in uses:
        cells = (
            f"{use.share:.0%}",
            format_count(use.tokens),
            _epochs(use),
            format_count(use.document_len),
            use.lengths,
        )
        table.add_row(use.name, *cells)
    console.print(table)
    flops = f"{format_count(planned.flops_per_token).replace('B', 'G')}FLOP per token"
    console.print(f"work       {flops}, {planned.flops_per_token * stage.steps * stage.batch_tokens:.3g} in total")
    for line in planned.rope:
        console.print(f"positions  {line}", soft_wrap=True)
    if planned.problem:
        console.print(f"does not fit as written: {planned.problem}", style="red", soft_wrap=True)
    if planned.chosen is None:
        return
    _print_estimate(console, planned, planned.chosen, price)
    if planned.faster is not None:
        from unspool.planning.fit import set_arguments

        words = shlex.join(set_arguments(planned.index, stage, planned.faster.stage))
        saved = 1 - planned.faster.seconds.step / planned.chosen.seconds.step
        console.print(f"faster     by {saved:.0%}: {words}", style="green", soft_wrap=True)
    elif not stage.compile and not found.machine.gpu.is_cpu:
        console.print(
            "hint       compile: true makes norms and gates about three times faster on a GPU", soft_wrap=True
        )


def _print_estimate(console: "Console", planned: "StagePlan", chosen: "Estimate", price: float | None) -> None:
    from unspool.planning.fit import set_arguments
    from unspool.planning.footprint import PARTS
    from unspool.recipe.launch import describe_layout

    held, machine, seconds = chosen.footprint, chosen.machine, chosen.seconds
    parts = ", ".join(f"{part} {getattr(held, part) / GIB:.1f}" for part in PARTS if getattr(held, part) >= 0.05 * GIB)
    rest = "what Python and other programs take" if machine.gpu.is_cpu else "the CUDA context"
    room = f"{held.device / GIB:.1f} of {machine.room / GIB:.1f} GiB ({machine.gpu.gib:.4g} minus {rest})"
    console.print(f"memory     {room} in {held.moment}", soft_wrap=True)
    console.print(f"           {parts}", soft_wrap=True)
    if not machine.gpu.is_cpu:
        console.print(f"host       {_host(chosen)}", soft_wrap=True)
    console.print(f"layout     {describe_layout(chosen.layout)}", soft_wrap=True)
    console.print(f"policy     {_policy(chosen)}", soft_wrap=True)
    parts = ", ".join(f"{name} {value:.3g}" for name, value in vars(seconds).items() if value >= 0.005 * seconds.step)
    console.print(f"step       {seconds.step:.3g} s ({parts})", soft_wrap=True)
    each = "" if machine.gpu.is_cpu else " per GPU"
    speed = f"{format_count(chosen.tokens_per_second / machine.count)} tokens/s{each}, MFU {planned.mfu:.0%}"
    console.print(f"time       {_time(chosen.hours, machine, price)}; {speed}", soft_wrap=True)
    _print_reported(console, planned, chosen)
    words = set_arguments(planned.index, planned.stage, chosen.stage)
    if words:
        console.print(f"paste      {shlex.join(words)}", style="green", soft_wrap=True)


def _print_reported(console: "Console", planned: "StagePlan", chosen: "Estimate") -> None:
    """The paper's hours, and how much of the difference is speed, device, and what attention costs."""
    found = planned.reported
    if found is None:
        return
    hours, own = found.hours, chosen.tokens_per_second / chosen.machine.count
    mfu = "" if found.mfu is None else f", MFU {found.mfu:.0%}"
    console.print(
        f"paper      {hours.gpu_hours:,.0f} {hours.gpu} hours for {format_size(hours.tokens)} tokens ({hours.source}): "
        f"{format_count(found.tokens_per_second)} tokens/s per GPU{mfu}",
        soft_wrap=True,
    )
    lines = [f"{own / found.tokens_per_second:.2g} times the paper's speed per GPU"]
    if found.mfu is not None and planned.mfu is not None:
        lines[0] += f": the same work at MFU {planned.mfu:.0%} instead of {found.mfu:.0%}"
    if planned.waiting > 1.02:
        lines.append(f"not in this plan: ranks wait for those with longer documents, ×{planned.waiting:.2f}")
    if found.mfu and found.full_mfu and found.full_mfu > 1.2 * found.mfu:
        lines.append(f"if each row cost the paper as much as one document of that length, MFU {found.full_mfu:.0%}")
    for line in [*lines, *([hours.why] if hours.why else [])]:
        console.print(f"           {line}", soft_wrap=True)


def _host(chosen: "Estimate") -> str:
    """Host memory of one GPU by what holds it; the checkpoint's copy only where there is room for it."""
    machine, host = chosen.machine, chosen.footprint.on_host
    parts = {"loading": host.loading, "states": host.states, "activations": host.activations, "batches": host.batches}
    shown = [f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB]
    copy = f"a copy of {host.copy / GIB:.1f} for each checkpoint"
    fits = host.step + host.copy <= machine.host_room
    shown.append(f"{copy} fits" if fits else f"{copy} does not fit, so training waits while checkpoints are written")
    whose = " for each GPU" if machine.count > 1 else ""
    return f"{host.needed / GIB:.1f} of {machine.host_room / GIB:.1f} GiB{whose}; {', '.join(shown)}"


def _policy(chosen: "Estimate") -> str:
    from unspool.models.memory.policy import MemoryPolicy

    own, plain = asdict(chosen.stage.memory), asdict(MemoryPolicy())
    words = [
        f"{name} {value}" for name, value in own.items() if name == "activation_checkpointing" or value != plain[name]
    ]
    words.append(
        f"optimizer {', '.join(f'{key} {value}' for key, value in chosen.stage.optimizer.model_dump().items())}"
    )
    if chosen.stage.compile:
        words.append("compile")
    if chosen.stage.parallel.offload:
        words.append("weights in host memory")
    return ", ".join(words)


def _time(hours: float, machine: "Machine", price: float | None) -> str:
    count = machine.count
    spent = (
        f"{hours * 60:.3g} minutes" if hours < 1 else f"{hours:,.1f} hours" if hours < 96 else f"{hours / 24:,.1f} days"
    )
    gpus = f", {hours * count:,.3g} GPU hours" if hours * count < 100 else f", {hours * count:,.0f} GPU hours"
    return (
        spent
        + ("" if machine.gpu.is_cpu else gpus)
        + ("" if price is None else f", {price * hours * count:,.2f} at {price:g} per hour")
    )


def _epochs(use: Any) -> str:
    return "?" if use.epochs is None else f"{use.epochs:.2g}"


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=not column.startswith("how"))
    return table
