"""`unspool.launch`: run a recipe on several GPUs or nodes with torchrun, Slurm or Ray."""

import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.artifacts import write_atomic
from unspool.core.config import lookup
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.lock import lock_run
from unspool.core.result import Result
from unspool.recipe.launch import (
    PORT,
    LaunchOptions,
    check_layouts,
    local_command,
    ray_command,
    slurm_script,
    torchrun_lines,
)
from unspool.recipe.load import Overrides, check_inputs, load_recipe, override_texts
from unspool.training.parallel.config import REFUSAL

logger = logging.getLogger(__name__)

VIA = ("torchrun", "slurm", "ray")
VERBS = ("run", "train")


@dataclass(frozen=True, kw_only=True)
class Job(Result):
    """A job of several ranks, as `launch` returns it. Its `str` is the script, or one command line per node.

    Example:
        >>> import unspool
        >>> job = unspool.launch("tiny", dry_run=True)
        >>> job.ranks, len(job.lines)
        (1, 1)
    """

    via: str
    ranks: int
    layouts: list[str]  # how each stage is spread over the ranks
    script: str | None = None  # of Slurm
    script_path: str | None = None
    lines: list[str] | None = None  # of torchrun and Ray, one per node
    result: str | None = None  # the answer of sbatch, or "ended"; None if nothing was started
    exit_code: int = 0  # of a job on this machine

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None and name != "exit_code"}

    def print(self, console: Console) -> None:
        for line in [self.script.rstrip("\n")] if self.script is not None else self.lines or []:
            console.out(line, highlight=False)


def launch(
    recipe: str | Path,
    overrides: Overrides = None,
    *,
    nodes: int = 1,
    gpus: int = 1,
    via: str = "torchrun",
    dry_run: bool = False,
    verb: str = "run",
    env: Mapping[str, str] | None = None,
    python: str | None = None,
    restarts: int = 3,
    host: str | None = None,
    port: int = PORT,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    time: str | None = None,
    cpus: int | None = None,
    sbatch: Sequence[str] = (),
) -> Job:
    """Run a recipe on several GPUs or nodes.

    The recipe and the layout of its stages are checked first. On one node with torchrun, this waits for the job. On
    several nodes with torchrun nothing is started: run one of `lines` on each node.

    Args:
        recipe: A recipe file, or the name of a bundled recipe.
        overrides: Changes to the recipe, such as `{"stages.0.lr": 2e-5}`.
        nodes: Number of nodes.
        gpus: Ranks per node, one per GPU.
        via: `torchrun`, `slurm` or `ray`.
        dry_run: Return the script or the command lines; start nothing.
        verb: `run` for everything, `train` for no evaluation and no report.
        env: Environment variables for all ranks.
        python: Python interpreter of the ranks; this one by default.
        restarts: Number of restarts from the last checkpoint after a rank fails.
        host: Name of the first node, for torchrun on several.
        port: A free port on the first node.
        partition: Slurm partition.
        account: Slurm account.
        qos: Slurm's quality of service.
        time: Slurm's time limit, such as `24:00:00` or `2-0`.
        cpus: CPUs per node, for Slurm.
        sbatch: Additional options of sbatch, such as `["--constraint=h100"]`.

    Returns:
        The job: its script or command lines, and its `exit_code` if it ran here.

    Raises:
        ConfigError: The recipe or a setting is wrong, or a stage does not fit the ranks.
        UnspoolError: sbatch or a rank refused the job.

    Example:
        >>> import unspool
        >>> job = unspool.launch("tiny", via="slurm", partition="gpu", dry_run=True)
        >>> "#SBATCH --partition=gpu" in job.script
        True
    """
    for name, value, allowed in (("via", via, VIA), ("verb", verb, VERBS)):
        lookup(dict.fromkeys(allowed), value, kind=f"`{name}`")
    loaded = load_recipe(recipe, overrides)
    check_inputs(loaded)
    options = LaunchOptions(
        recipe=str(recipe),
        overrides=tuple(override_texts(overrides)),
        verb=verb,
        nodes=nodes,
        gpus=gpus,
        on_gpus=loaded.recipe.device != "cpu",
        name=loaded.recipe.name,
        folder=Path.cwd(),
        logs=Path.cwd() / loaded.recipe.out / "launch",
        python=python or sys.executable,
        env=dict(env or {}),
        restarts=restarts,
        host=host,
        port=port,
        partition=partition,
        account=account,
        qos=qos,
        time=time,
        cpus=cpus,
        sbatch=tuple(sbatch),
    )
    layouts = check_layouts(loaded, options.world_size)
    for line in layouts:
        logger.info(line)
    starts = not dry_run and not (via == "torchrun" and nodes > 1)
    known: dict[str, Any] = {"via": via, "ranks": options.world_size, "layouts": layouts}
    if via == "slurm":
        path, script = options.logs / f"{options.name}.sbatch", slurm_script(options)
        answer = submit(path, script) if starts else None
        return Job(**known, script=script, script_path=str(path), result=answer)
    known["lines"] = torchrun_lines(options) if via == "torchrun" else [shlex.join(ray_command(options))]
    if not starts:
        return Job(**known)
    if via == "torchrun":
        with lock_run(loaded.recipe.out):  # refuse a folder in use once, instead of on restarted ranks
            pass
    elif find_spec("ray") is None:
        raise ConfigError("`via='ray'`: Ray is not installed; pip install 'unspool[cluster]'.")
    return Job(**known, result="ended", exit_code=start(options, via))


def start(options: LaunchOptions, via: str) -> int:
    """Run the job on this machine and return its exit code; UnspoolError if a rank refuses the recipe."""
    command = local_command(options, os.getpid()) if via == "torchrun" else ray_command(options)
    with tempfile.TemporaryDirectory() as scratch:
        refusal = Path(scratch) / "refusal"
        code = _run(command, os.environ | options.env | ({REFUSAL: str(refusal)} if via == "torchrun" else {}))
        if refusal.is_file():
            raise UnspoolError(refusal.read_text(encoding="utf-8"))
    return code if code >= 0 else 128 - code


def _run(command: list[str], env: dict[str, str]) -> int:
    """Run a command and forward SIGTERM to it. Ctrl-C reaches it by itself, so this process only waits for its end."""
    stopped = False
    with subprocess.Popen(command, env=env) as child:
        if threading.current_thread() is not threading.main_thread():
            return child.wait()  # only the main thread can react to signals

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


def submit(path: Path, script: str) -> str:
    """Write a script and submit it to Slurm; returns what sbatch prints."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, script)
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"`via='slurm'`: sbatch is not installed here; run this on a login node, or submit {path} there."
        ) from None
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        raise UnspoolError(
            f"sbatch refused the job ({errors[-1] if errors else f'exit code {done.returncode}'}); check `partition`, "
            f"`account` and `time`, or submit {path} by hand."
        )
    return done.stdout.strip()
