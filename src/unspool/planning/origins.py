"""Origin of a plan's numbers: measured, fitted or modeled, and the bandwidths that it assumes."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from unspool.planning.calibration import Calibration
from unspool.planning.fit import Estimate, Machine
from unspool.planning.step_time import FP8, StepSeconds

MEASURED, FITTED, MODELED = "measured", "fitted", "modeled"
LEGEND = {
    MEASURED: "steps of a few layers timed on this device, extended to all layers",
    FITTED: "computed with rates fitted to measured steps",
    MODELED: "computed from shapes, data sheets and bandwidths, not measured",
}


def number_origins(chosen: Estimate, measured: Calibration | None) -> dict[str, str]:
    """Return the origin of each number of an estimate, by its path in `unspool plan --json`."""
    is_fp8 = chosen.stage.precision == "fp8"
    computing = MODELED if is_fp8 else _computing(chosen.machine, measured)
    parts = {part.name: computing for part in fields(StepSeconds)}
    # Between GPUs nothing is measured: not even that ranks need not wait.
    step = MODELED if chosen.machine.count > 1 else computing
    parts["waiting"] = step
    return {
        "memory.device": MODELED if measured is None or is_fp8 else FITTED,
        "memory.host": MODELED,
        **{f"seconds.{name}": origin for name, origin in parts.items()},
        **dict.fromkeys(("seconds.step", "tokens_per_second", "hours", "gpu_hours", "mfu"), step),
    }


def _computing(machine: Machine, measured: Calibration | None) -> str:
    if measured is not None:
        return MEASURED
    return FITTED if machine.gpu.measured or machine.gpu.is_cpu else MODELED


def describe_origins(chosen: Estimate, measured: Calibration | None) -> str:
    """Return the origins in one line, for several GPUs."""
    found, seconds = number_origins(chosen, measured), chosen.seconds
    computing = seconds.step - seconds.waiting
    return (
        f"memory {found['memory.device']}; {computing:.3g} s of computing {found['seconds.matmul']}; "
        f"{seconds.waiting:.3g} s of waiting {found['seconds.waiting']}; step, time and MFU {found['seconds.step']}"
    )


def describe_fp8() -> str:
    """Return the origin of the seconds of FP8 products in one line."""
    return (
        f"fp8 modeled: linear layers {FP8:g} times as fast as in bf16, as one layer of Llama-3-8B's shape on an H200; "
        "no step was measured"
    )


def describe_terms(chosen: Sequence[Estimate], measured: Calibration | None) -> str:
    """Explain the origins that occur in the estimates."""
    used = {origin for one in chosen for origin in number_origins(one, measured).values()}
    return "; ".join(f"{name}: {meaning}" for name, meaning in LEGEND.items() if name in used)


def describe_links(machine: Machine) -> str:
    """Return the bandwidths between GPUs, and whether they were given or assumed."""
    links = machine.speed.links
    inside = "given" if machine.link is not None else "assumed: 80% of the data sheet; set it with --link"
    between = "given" if machine.network is not None else "assumed: 80% of a 400 Gbit/s card; set it with --network"
    return (
        f"{links.inside / 1e9:.4g} GB/s per GPU inside a machine of {links.node} ({inside}), "
        f"{links.between / 1e9:.4g} GB/s between machines ({between})"
    )


def plain_links(machine: Machine) -> dict[str, Any]:
    """Return the bandwidths in GB/s, for --json."""
    links = machine.speed.links
    return {
        "inside_gb_per_s": links.inside / 1e9,
        "between_gb_per_s": links.between / 1e9,
        "gpus_per_machine": links.node,
        "inside_origin": "assumed" if machine.link is None else "given",
        "between_origin": "assumed" if machine.network is None else "given",
    }
