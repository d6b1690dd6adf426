"""`unspool launch`: run a recipe on several GPUs or nodes with torchrun, Slurm or Ray."""

import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli.recipes import Override
from unspool.cli.run import RecipeArgument
from unspool.core.artifacts import write_atomic
from unspool.core.console import print_json
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.lock import lock_run

if TYPE_CHECKING:
    from unspool.recipe.launch import LaunchOptions

logger = logging.getLogger(__name__)

VIA = ("torchrun", "slurm", "ray")
VERBS = ("run", "train")
SLURM = "Slurm"
SEVERAL = "Several nodes"


def launch(
    recipe: RecipeArgument,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="Ranks per node, one per GPU.")] = 1,
    via: Annotated[str, typer.Option(help="torchrun, slurm or ray.")] = "torchrun",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands or the script; run nothing.")] = False,
    verb: Annotated[str, typer.Option(help="run: everything; train: no evaluation and no report.")] = "run",
    overrides: Override = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment variable for all ranks. Repeatable.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Python interpreter of the ranks; default: this one.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Number of restarts after a rank fails.")] = 3,
    host: Annotated[str | None, typer.Option(help="Name of the first node.", rich_help_panel=SEVERAL)] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="A free port on the first node.", rich_help_panel=SEVERAL)
    ] = 29400,
    partition: Annotated[str | None, typer.Option(help="Slurm partition.", rich_help_panel=SLURM)] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit, such as 24:00:00 or 2-0.", rich_help_panel=SLURM)
    ] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.", rich_help_panel=SLURM)] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.", rich_help_panel=SLURM)] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPUs per node.", rich_help_panel=SLURM)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Additional sbatch option. Repeatable.", rich_help_panel=SLURM),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the job as JSON.")] = False,
) -> None:
    """Run a recipe on several GPUs or nodes.

    Checks the recipe and the layout of its stages first. If a rank dies or
    hangs, the job prints its rank and step, and restarts from the last
    checkpoint, at most --restarts times.

        unspool launch my.yaml --gpus 8

        unspool launch my.yaml --nodes 4 --gpus 8 --via slurm --partition gpu --time 24:00:00 --dry-run

        unspool launch my.yaml --nodes 2 --gpus 8 --host node1     prints a line for each node
    """
    for option, value, allowed in (("--via", via, VIA), ("--verb", verb, VERBS)):
        if value not in allowed:
            raise ConfigError(f"{option} {value!r} is not known; use {', '.join(allowed)}.")
    from unspool.recipe.launch import LaunchOptions, check_layouts, parse_env
    from unspool.recipe.load import check_inputs, load_recipe

    loaded = load_recipe(recipe, overrides)
    check_inputs(loaded)
    options = LaunchOptions(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        verb=verb,
        nodes=nodes,
        gpus=gpus,
        on_gpus=loaded.recipe.device != "cpu",
        name=loaded.recipe.name,
        folder=Path.cwd(),
        logs=Path.cwd() / loaded.recipe.out / "launch",
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
    layouts = check_layouts(loaded, options.world_size)
    if not dry_run and via == "torchrun":
        with lock_run(loaded.recipe.out):  # refuse a folder in use once, instead of on restarted ranks
            pass
    job: dict[str, Any] = {"via": via, "ranks": options.world_size, "layouts": layouts} | _plan(options, via)
    if not dry_run and not (via == "torchrun" and nodes > 1):
        job["result"] = _start(options, via, job, quiet=as_json)
    _print(job, as_json=as_json, dry_run=dry_run)


def _plan(options: "LaunchOptions", via: str) -> dict[str, Any]:
    """The script of a job, or one command line per node."""
    from unspool.recipe.launch import ray_command, slurm_script, torchrun_lines

    if via == "slurm":
        return {"script": slurm_script(options), "script_path": str(options.logs / f"{options.name}.sbatch")}
    return {"lines": torchrun_lines(options) if via == "torchrun" else [shlex.join(ray_command(options))]}


def _start(options: "LaunchOptions", via: str, job: dict[str, Any], *, quiet: bool) -> Any:
    from unspool.recipe.launch import local_command, ray_command
    from unspool.training.parallel.config import REFUSAL

    if via == "slurm":
        return _submit(Path(job["script_path"]), job["script"])
    if via == "ray" and find_spec("ray") is None:
        raise ConfigError("--via ray: Ray is not installed; pip install 'unspool[cluster]'.")
    if not quiet:
        for line in job["layouts"]:
            logger.info(line)
    command = local_command(options, os.getpid()) if via == "torchrun" else ray_command(options)
    with tempfile.TemporaryDirectory() as scratch:
        refusal = Path(scratch) / "refusal"
        code = _run(command, os.environ | options.env | ({REFUSAL: str(refusal)} if via == "torchrun" else {}))
        if refusal.is_file():
            raise UnspoolError(refusal.read_text(encoding="utf-8"))
    if code:
        # The ranks have printed what failed.
        raise typer.Exit(code if code > 0 else 128 - code)
    return "ended"


def _run(command: list[str], env: dict[str, str]) -> int:
    """Run a command and forward SIGTERM to it. Ctrl-C reaches it by itself, so this process only waits for its end."""
    stopped = False
    with subprocess.Popen(command, env=env) as child:

        def stop(*_: Any) -> None:
            nonlocal stopped
            stopped = True
            child.terminate()

        reactions: dict[int, Any] = {signal.SIGTERM: stop, signal.SIGINT: lambda *_: None}
        before = {number: signal.signal(number, react) for number, react in reactions.items()}
        try:
            code = child.wait()
        finally:
            for number, react in before.items():
                signal.signal(number, react)
    return 128 + signal.SIGTERM if stopped and code else code


def _submit(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, script)
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"--via slurm: sbatch is not installed here; run this on a login node, or submit {path} there."
        ) from None
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise UnspoolError(
            f"sbatch refused the job ({errors[-1] if errors else f'exit code {done.returncode}'}); check --partition, "
            f"--account and --time, or submit {path} by hand."
        )
    return done.stdout.strip()


def _print(job: dict[str, Any], *, as_json: bool, dry_run: bool) -> None:

    if as_json:
        print_json(job)
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
        logger.info(f"run one of these lines on each of the {len(job['lines'])} nodes, in this folder:")
    for line in job["lines"]:
        typer.echo(line)
