"""`unspool.plan`: the machine that a recipe is planned for, measured rates, and the plan."""

import logging
import re
from dataclasses import replace
from pathlib import Path

from unspool.core.errors import ConfigError
from unspool.core.host_memory import measure_host_memory
from unspool.core.progress import progress_bar
from unspool.planning.calibration import FILE, Calibration, load_calibration, measure, save_calibration
from unspool.planning.cost import REFERENCE, find_gpu
from unspool.planning.fit import GIB, Machine
from unspool.planning.local_machine import CPU, THIS, local_cpu, local_gpu
from unspool.planning.recipe_inputs import planned_model
from unspool.planning.recipe_plan import Plan, plan_recipe
from unspool.recipe.load import LoadedRecipe, Overrides, load_recipe

logger = logging.getLogger(__name__)

_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([GT])i?B?", re.IGNORECASE)


def plan(
    recipe: str | Path,
    overrides: Overrides = None,
    *,
    gpu: str | None = None,
    count: int = 1,
    host_mem: str | None = None,
    price: float | None = None,
    model: str | None = None,
    measured: bool = False,
) -> Plan:
    """Plan a recipe before it runs: tokens and epochs, memory, time, and settings that fit.

    Reads no weights, and writes nothing unless `measured`.

    Args:
        recipe: A recipe file, or the name of a bundled recipe.
        overrides: Changes to the recipe, such as `{"stages.0.context_length": "32K"}`.
        gpu: Device to plan for, such as `h100`; `this` machine's, or its `cpu`. By default the local GPU, else an H200.
        count: Number of GPUs.
        host_mem: Host memory of one machine, such as `1.9T`.
        price: Price of a GPU hour, to know the cost.
        model: Folder or Hub id to read the model's config from, if the model itself is missing.
        measured: Measure a few steps on the local device first, and use their rates.

    Returns:
        The plan: `fits`, `hours`, `stages`; print it to see all of it.

    Raises:
        ConfigError: The recipe is wrong, or there is no such device.

    Example:
        >>> import unspool
        >>> plan = unspool.plan("tiny", gpu="h100")
        >>> plan.fits
        True
    """
    loaded = load_recipe(recipe, overrides)
    machine = choose_machine(gpu, count, host_mem, here=measured)
    rates = _measured(loaded, machine, model) if measured else _saved(loaded, machine, model)
    with progress_bar("stages planned", len(loaded.recipe.stages)) as advance:
        found = plan_recipe(loaded, machine, model=model, measured=rates, advance=lambda done: advance(done))
    return replace(found, price=price)


def choose_machine(gpu: str | None, count: int, host_mem: str | None, *, here: bool) -> Machine:
    """The machine to plan for; `here`: rates are measured on this one."""
    host, name = _bytes(host_mem), (gpu or "").lower()
    if name == CPU or (name == THIS and local_gpu() is None):
        if count > 1:
            raise ConfigError(f"`gpu={gpu!r}` plans for one process on this CPU; leave `count` out.")
        if host is not None:
            raise ConfigError(f"`gpu={gpu!r}` plans for this machine's own memory; leave `host_mem` out.")
        return Machine(gpu=local_cpu(), count=1)
    own = local_gpu() if name in ("", THIS) or here else None
    if here and own is None:
        raise ConfigError(
            "`measured=True` needs a local GPU, and there is none; add `gpu='this'` to measure on this CPU."
        )
    if here and name not in ("", THIS) and own is not None and find_gpu(name) != own:
        raise ConfigError(
            f"`measured=True` uses the local {own.name}, so `gpu={gpu!r}` cannot be combined with it; remove one of "
            "them."
        )
    if host is None and name in ("", THIS) and own is not None:
        memory = measure_host_memory()
        host = None if memory is None else float(memory.total)
    if own is None and not name:
        logger.info(
            f"no local GPU and no `gpu`: planning for {REFERENCE.title}; `gpu='this'` plans for this machine's CPU"
        )
    return Machine(gpu=own or (find_gpu(name) if name else REFERENCE), count=count, host=host)


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    match = _BYTES.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f"`host_mem` {text!r} is not a size; use a number with G or T, such as 512G or 1.9T (powers of 1024)."
        )
    return float(match[1]) * (GIB if match[2].upper() == "G" else 1024 * GIB)


def _saved(loaded: LoadedRecipe, machine: Machine, model: str | None) -> Calibration | None:
    found = load_calibration(loaded.recipe.out)
    if found is None or not found.matches(machine.gpu.name, planned_model(loaded, model).shape):
        return None
    logger.info(f"using measured rates from {loaded.recipe.out / FILE}")
    return found


def _measured(loaded: LoadedRecipe, machine: Machine, model: str | None) -> Calibration:
    import torch

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
