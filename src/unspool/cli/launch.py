"""`unspool launch`: a recipe on several devices or machines, by torchrun, Slurm or Ray."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.recipes import Override
from unspool.cli.run import RecipeArgument
from unspool.core.errors import ConfigError, UnspoolError

if TYPE_CHECKING:
    from unspool.recipe.launch import Ask

logger = logging.getLogger(__name__)

VIA = ("torchrun", "slurm", "ray")
VERBS = ("run", "train")
SLURM = "Slurm"
AT = "Several nodes"


def launch(
    recipe: RecipeArgument,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="Ranks on each machine, one to a GPU.")] = 1,
    via: Annotated[str, typer.Option(help="torchrun, slurm or ray.")] = "torchrun",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run; run nothing.")] = False,
    verb: Annotated[str, typer.Option(help="run: everything; train: without scores and report.")] = "run",
    overrides: Override = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Set a variable for all ranks. Repeatable.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="The Python to run ranks with; this one when not given.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often ranks are started again when one fails.")] = 3,
    host: Annotated[str | None, typer.Option(help="The first machine's name.", rich_help_panel=AT)] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="A free port of it.", rich_help_panel=AT)] = 29400,
    partition: Annotated[str | None, typer.Option(help="Where to queue.", rich_help_panel=SLURM)] = None,
    time: Annotated[str | None, typer.Option(help="Such as 24:00:00 or 2-0.", rich_help_panel=SLURM)] = None,
    account: Annotated[str | None, typer.Option(help="Who pays.", rich_help_panel=SLURM)] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.", rich_help_panel=SLURM)] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs on each machine.", rich_help_panel=SLURM)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option of sbatch. Repeatable.", rich_help_panel=SLURM),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
) -> None:
    """Run a recipe on several GPUs or machines.

    The recipe and how its stages are spread over the ranks are checked first.
    A rank that dies or hangs ends the job with its name and step; it is
    started again from the last checkpoint, --restarts times.

        unspool launch my.yaml --gpus 8

        unspool launch my.yaml --nodes 4 --gpus 8 --via slurm --partition gpu --time 24:00:00 --dry-run

        unspool launch my.yaml --nodes 2 --gpus 8 --host node1     prints a line for each machine
    """
    for option, value, allowed in (("--via", via, VIA), ("--verb", verb, VERBS)):
        if value not in allowed:
            raise ConfigError(f"{option} {value!r} is not known; use {', '.join(allowed)}.")
    from unspool.recipe.launch import Ask, check_layouts, parse_env
    from unspool.recipe.load import check_inputs, load_recipe

    loaded = load_recipe(recipe, overrides)
    check_inputs(loaded)
    ask = Ask(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        verb=verb,
        nodes=nodes,
        gpus=gpus,
        on_gpus=loaded.recipe.device != "cpu",
        name=loaded.recipe.name,
        folder=Path.cwd(),
        logs=(Path.cwd() / loaded.recipe.out / "launch"),
        python=python or sys.executable,
        env=parse_env(env or []),
        restarts=restarts,
        host=host,
        port=port,
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        cpus=cpus,
        sbatch=tuple(sbatch or ()),
    )
    layouts = check_layouts(loaded, ask.world_size)
    job: dict[str, Any] = {"via": via, "ranks": ask.world_size, "layouts": layouts} | _plan(ask, via)
    if not dry_run and not (via == "torchrun" and nodes > 1):
        job["result"] = _start(ask, via, job, quiet=as_json)
    _print(job, as_json=as_json, dry_run=dry_run)


def _plan(ask: "Ask", via: str) -> dict[str, Any]:
    """What would be run: the script of a job, or a line for each machine."""
    from unspool.recipe.launch import ray_words, slurm_script, torchrun_lines

    if via == "slurm":
        return {"script": slurm_script(ask), "script_path": str(ask.logs / f"{ask.name}.sbatch")}
    return {"lines": torchrun_lines(ask) if via == "torchrun" else [shlex.join(ray_words(ask))]}


def _start(ask: "Ask", via: str, job: dict[str, Any], *, quiet: bool) -> Any:
    from unspool.recipe.launch import ray_words, torchrun_words

    if via == "slurm":
        return _submit(Path(job["script_path"]), job["script"])
    if via == "ray" and find_spec("ray") is None:
        raise ConfigError("--via ray needs Ray, which is not installed here; pip install 'unspool[cluster]'.")
    if not quiet:
        for line in job["layouts"]:
            logger.info(line)
    words = torchrun_words(ask) if via == "torchrun" else ray_words(ask)
    code = _run(words, os.environ | ask.env)
    if code:
        # What went wrong has been said by the ranks.
        raise typer.Exit(code if code > 0 else 128 - code)
    return "ended"


def _run(words: list[str], env: dict[str, str]) -> int:
    """SIGTERM is handed on. Ctrl-C reaches everybody in the terminal by itself; the job ends, not the wait for it."""
    with subprocess.Popen(words, env=env) as child:
        reactions: dict[int, Any] = {signal.SIGTERM: lambda *_: child.terminate(), signal.SIGINT: lambda *_: None}
        before = {number: signal.signal(number, react) for number, react in reactions.items()}
        try:
            return child.wait()
        finally:
            for number, react in before.items():
                signal.signal(number, react)


def _submit(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"--via slurm: there is no sbatch here; run this where jobs are submitted, or submit {path} there."
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise UnspoolError(
            f"sbatch refused the job ({said[-1] if said else f'exit code {done.returncode}'}); check --partition, "
            f"--account and --time, or submit {path} by hand to try."
        )
    return done.stdout.strip()


def _print(job: dict[str, Any], *, as_json: bool, dry_run: bool) -> None:

    if as_json:
        typer.echo(json.dumps(job, indent=1))
        return
    if "result" in job:
        if job["via"] == "slurm":
            typer.echo(job["result"])
        return
    for line in job["layouts"]:
        logger.info(line)
    if "script" in job:
        typer.echo(job["script"], nl=False)
        return
    if not dry_run:
        logger.info(f"run one of these lines on each of the {len(job['lines'])} machines, in this folder:")
    for line in job["lines"]:
        typer.echo(line)
