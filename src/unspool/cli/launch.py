"""`unspool launch`: run a recipe on several GPUs or nodes with torchrun, Slurm or Ray."""

import logging
from typing import Annotated

import typer

from unspool.cli.recipes import Override
from unspool.cli.run import RecipeArgument
from unspool.core.console import print_json

logger = logging.getLogger(__name__)

SLURM = "Slurm"
SEVERAL = "Several nodes"


def launch(
    recipe: RecipeArgument,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Number of nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Ranks per node, one per GPU.")] = 1,
    via: Annotated[str, typer.Option(help="Launcher: torchrun, slurm or ray.")] = "torchrun",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands or the script; run nothing.")] = False,
    verb: Annotated[str, typer.Option(help="run (everything) or train (without evaluation and report).")] = "run",
    overrides: Override = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment variable for all ranks. Repeatable.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Python interpreter of the ranks. Default: this one.")] = None,
    restarts: Annotated[int, typer.Option(min=0, metavar="N", help="Number of restarts after a rank fails.")] = 3,
    host: Annotated[str | None, typer.Option(help="Name of the first node.", rich_help_panel=SEVERAL)] = None,
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, metavar="PORT", help="A free port on the first node.", rich_help_panel=SEVERAL),
    ] = 29400,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.", rich_help_panel=SLURM)] = None,
    time: Annotated[
        str | None, typer.Option(help="Slurm time limit, such as 24:00:00 or 2-0.", rich_help_panel=SLURM)
    ] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.", rich_help_panel=SLURM)] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm quality of service.", rich_help_panel=SLURM)] = None,
    cpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPUs per node.", rich_help_panel=SLURM)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Additional sbatch option. Repeatable.", rich_help_panel=SLURM),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
) -> None:
    """Run a recipe on several GPUs or nodes.

    Checks the recipe and the layout of its stages first. If a rank dies or
    hangs, the job prints its rank and step and restarts from the last
    checkpoint, at most --restarts times. On several nodes with torchrun,
    the command prints one line to run on each node.

        unspool launch my.yaml --gpus 8

        unspool launch my.yaml --nodes 2 --gpus 8 --host node1

        unspool launch my.yaml --nodes 4 --gpus 8 --via slurm --dry-run
    """
    from unspool.recipe import start_job
    from unspool.recipe.launch import parse_env

    job = start_job.launch(
        recipe,
        overrides,
        nodes=nodes,
        gpus=gpus,
        via=via,
        dry_run=dry_run,
        verb=verb,
        env=parse_env(env or []),
        python=python,
        restarts=restarts,
        host=host,
        port=port,
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        cpus=cpus,
        sbatch=sbatch or (),
    )
    if job.exit_code:
        raise typer.Exit(job.exit_code)  # the ranks have printed what failed
    if as_json:
        print_json(job.to_dict())
    elif job.result is None:
        if job.lines is not None and not dry_run:
            logger.info(f"run one of these lines on each of the {nodes} nodes, in this folder:")
        typer.echo(job.script if job.script is not None else "\n".join(job.lines or []), nl=job.script is None)
    elif via == "slurm":
        typer.echo(job.result)
