"""`unspool plan`: tokens, memory, time and settings of a recipe before it runs."""

from typing import Annotated

import typer

from unspool.cli.recipes import Override
from unspool.cli.run import RecipeArgument
from unspool.core.console import PlainConsole, print_json
from unspool.core.errors import ConfigError
from unspool.planning.cost import GPUS, find_gpu
from unspool.planning.local_machine import CPU, THIS
from unspool.recipe.load import load_recipe

MAX_BANDWIDTH = 1e6  # GB/s


def plan(
    recipe: RecipeArgument,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"Device to plan for: {', '.join(GPUS)}, this (the local GPU, else the local CPU) or cpu (the local "
            "CPU). Default: the local GPU, else an H200."
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=65536, metavar="N", help="Number of GPUs.")] = 1,
    host_mem: Annotated[
        str | None,
        typer.Option(
            "--host-mem",
            help="Host memory of one machine, such as 512G or 1.9T. Default: this machine's memory for its own GPU, "
            "else 128G per GPU.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Price of a GPU hour, to print the cost.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id to read the model's config from, or a known shape such as llama-3.1-8b, if the "
            "model itself is missing."
        ),
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measure", help="Measure a few steps on the local device first, and use their rates.")
    ] = False,
    link: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=MAX_BANDWIDTH,
            metavar="GB/S",
            help="Bandwidth per GPU inside a machine, in each direction. Default: 80% of the data sheet.",
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            max=MAX_BANDWIDTH,
            metavar="GB/S",
            help="Bandwidth per GPU between machines, in each direction. Default: 40, which is 80% of a 400 Gbit/s "
            "card.",
        ),
    ] = None,
    overrides: Override = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Plan a recipe: tokens and epochs, memory, time, and settings that fit.

    Reads no weights, and writes nothing without --measure. If a stage does
    not fit as written, the command prints settings that fit and exits with
    code 2. Add them to the command and plan again.

        unspool plan smollm2-32k --gpu 4090

        unspool plan prolong-512k --gpu h100 --count 8 --host-mem 1.9T --price 2.5

        unspool plan prolong-64k --gpu h200 --count 64 --host-mem 2T --link 300 --network 25

        unspool plan tiny --gpu this --measure
    """
    load_recipe(recipe, overrides)  # mistakes appear before the imports below, which take seconds
    if gpu is not None and gpu.lower() not in (CPU, THIS):
        find_gpu(gpu.lower())
    from unspool.planning.make_plan import plan as make
    from unspool.planning.recipe_plan import as_plain

    found = make(
        recipe, overrides, gpu=gpu, count=count, host_mem=host_mem, price=price, model=model, measured=measured
    )
    if link is not None or network is not None:
        found = found.on_links(inside=link, between=network)
    if as_json:
        print_json(as_plain(found))
    else:
        found.print(PlainConsole())
    if not found.fits:
        raise ConfigError("\n".join(found.refusals()))
