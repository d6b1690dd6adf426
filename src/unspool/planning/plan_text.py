"""A plan in the terminal: data, memory, time and settings of each stage."""

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from unspool.core.formatting import format_duration
from unspool.core.sizes import format_count, format_size
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.fit import GIB, Estimate, Machine, set_arguments
from unspool.planning.footprint import PARTS
from unspool.planning.origins import describe_fp8, describe_links, describe_origins, describe_terms
from unspool.recipe.launch import describe_layout

if TYPE_CHECKING:
    from unspool.planning.recipe_plan import Plan, StagePlan


def print_plan(console: Console, found: "Plan") -> None:
    machine, price = found.machine, found.price
    shape = found.model.shape
    console.print(f"{found.loaded.recipe.name} on {machine.count} × {machine.gpu.title}", style="bold", soft_wrap=True)
    console.print(f"model  {format_count(shape.params)} parameters ({found.model.origin})", soft_wrap=True)
    if windows := found.model.windows:
        count = round(windows.share * shape.num_layers)
        console.print(
            f"layers {count} of {shape.num_layers} attend to the last {format_size(windows.size)} tokens only (sliding "
            "windows; their speed is not measured)",
            soft_wrap=True,
        )
    console.print(f"rates  {found.rates}", soft_wrap=True)
    if machine.count > 1 or machine.has_given_links:
        console.print(f"links  {describe_links(machine)}", soft_wrap=True)
    if machine.count > 1 and (chosen := [planned.chosen for planned in found.stages if planned.chosen]):
        console.print(f"terms  {describe_terms(chosen, found.measured)}", soft_wrap=True)
    console.print()
    _print_sources(console, found)
    for planned in found.stages:
        _print_stage(console, found, planned)
    for warning in found.data.warnings:
        console.print(warning, style="yellow", soft_wrap=True)
    if found.hours is not None and len(found.stages) > 1:
        console.print(f"\nall stages: {_time(found.hours, machine, price)}", style="bold")


def _print_sources(console: Console, found: "Plan") -> None:
    table = _table("source", "has", "origin of the number", "trained on", "epochs")
    for source in found.data.sources:
        amount = source.available
        has = "?" if amount.tokens is None else format_count(amount.tokens)
        table.add_row(source.name, has, f"{amount.how}: {amount.why}", format_count(source.tokens), _epochs(source))
    console.print(table)


def _print_stage(console: Console, found: "Plan", planned: "StagePlan") -> None:
    stage, uses = planned.stage, found.data.stages[planned.stage.name]
    steps = f"{stage.steps} steps of {format_size(stage.batch_tokens)} at {format_size(stage.context_length)}"
    console.print(f"\nstage {stage.name}", style="bold", end="")
    console.print(f"  {steps}, {format_count(stage.steps * stage.batch_tokens)} tokens")
    table = _table("dataset", "share", "tokens", "epochs", "documents", "origin of lengths")
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
    if planned.weighing_flops:
        console.print(_weighing(planned), soft_wrap=True)
    for line in planned.rope:
        console.print(f"positions  {line}", soft_wrap=True)
    if planned.problem:
        console.print(f"does not fit as written: {planned.problem}", style="red", soft_wrap=True)
    if planned.chosen is None:
        return
    _print_estimate(console, found, planned, planned.chosen)
    if planned.faster is not None:
        words = shlex.join(set_arguments(planned.index, stage, planned.faster.stage))
        saved = 1 - planned.faster.seconds.step / planned.chosen.seconds.step
        console.print(f"faster     by {saved:.0%}: {words}", style="green", soft_wrap=True)
    elif not stage.compile and not found.machine.gpu.is_cpu:
        console.print(
            "hint       compile: true makes norms and gates about three times faster on a GPU", soft_wrap=True
        )


def _weighing(planned: "StagePlan") -> str:
    """Describe the cost of weighing labels."""
    work = f"{format_count(planned.weighing_flops).replace('B', 'G')}FLOP more per token"
    line = f"weights    {planned.stage.loss.weights}: {work}, {planned.weighing_flops / planned.flops_per_token:.0%}"
    if planned.chosen is None:
        return line
    seconds = planned.chosen.seconds
    return f"{line}; {seconds.weighing:.3g} s more per step, {seconds.weighing / (seconds.step - seconds.weighing):.0%}"


def _print_estimate(console: Console, found: "Plan", planned: "StagePlan", chosen: Estimate) -> None:
    held, machine, seconds = chosen.footprint, chosen.machine, chosen.seconds
    parts = ", ".join(f"{part} {getattr(held, part) / GIB:.1f}" for part in PARTS if getattr(held, part) >= 0.05 * GIB)
    rest = "Python and other programs" if machine.gpu.is_cpu else "the CUDA context"
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
    console.print(f"time       {_time(chosen.hours, machine, found.price)}; {speed}", soft_wrap=True)
    if machine.count > 1:
        console.print(f"origins    {describe_origins(chosen, found.measured)}", soft_wrap=True)
    if chosen.stage.precision == "fp8":
        console.print(f"precision  {describe_fp8()}", soft_wrap=True)
    _print_reported(console, planned, chosen)
    words = set_arguments(planned.index, planned.stage, chosen.stage)
    if words:
        console.print(f"paste      {shlex.join(words)}", style="green", soft_wrap=True)


def _print_reported(console: Console, planned: "StagePlan", chosen: Estimate) -> None:
    """Print the paper's hours, and the parts of the difference due to speed, device and attention cost."""
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
        lines.append(f"not in this plan: ranks wait for ranks with longer documents, ×{planned.waiting:.2f}")
    if found.mfu and found.full_mfu and found.full_mfu > 1.2 * found.mfu:
        lines.append(f"if each row had cost the paper as much as one document of that length: MFU {found.full_mfu:.0%}")
    for line in [*lines, *([hours.why] if hours.why else [])]:
        console.print(f"           {line}", soft_wrap=True)


def _host(chosen: Estimate) -> str:
    """Describe host memory of one GPU by component; the checkpoint's copy only if it fits."""
    machine, host = chosen.machine, chosen.footprint.on_host
    parts = {"loading": host.loading, "states": host.states, "activations": host.activations, "batches": host.batches}
    shown = [f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB]
    copy = f"a copy of {host.copy / GIB:.1f} for each checkpoint"
    fits = host.step + host.copy <= machine.host_room
    shown.append(f"{copy} fits" if fits else f"{copy} does not fit, so training waits while checkpoints are written")
    whose = " for each GPU" if machine.count > 1 else ""
    return f"{host.needed / GIB:.1f} of {machine.host_room / GIB:.1f} GiB{whose}; {', '.join(shown)}"


def _policy(chosen: Estimate) -> str:
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


def _time(hours: float, machine: Machine, price: float | None) -> str:
    count = machine.count
    spent = f"{hours:,.1f} hours" if hours < 96 else f"{hours / 24:,.1f} days"
    if hours < 1:
        spent = format_duration(3600 * hours)
    gpus = f", {hours * count:,.3g} GPU hours" if hours * count < 100 else f", {hours * count:,.0f} GPU hours"
    return (
        spent
        + ("" if machine.gpu.is_cpu else gpus)
        + ("" if price is None else f", {price * hours * count:,.2f} at {price:g} per hour")
    )


def _epochs(use: Any) -> str:
    return "?" if use.epochs is None else f"{use.epochs:.2g}"


def _table(*columns: str) -> Any:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=not column.startswith("origin"))
    return table
