"""A job of several ranks as the command lines or the script that start it.

In: what the user asks for (`Ask`), already known to fit the recipe. Out: commands as lists of words, and texts in
which every value is quoted. Nothing is run here.
Promise: what is printed is what is run. Values that a scheduler would read as something else are refused.
Elsewhere: whether stages fit the ranks (layouts.py), what ranks do when one fails (train/heartbeat.py).
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.config import SIZES, config_values
from unspool.recipe.load import HUB_ID, LoadedRecipe
from unspool.recipe.paths import path_exists
from unspool.training.config import StageConfig
from unspool.training.parallel.config import Layout, Work, check_layout, settle_layout

PORT = 29400
GRACE = 300  # seconds that a stage may take to finish its step and save, when the machine is taken away
WORD = re.compile(r"[A-Za-z0-9][\w.,:@+/-]*")
HOST = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
TIME = re.compile(r"\d+(-\d{1,2}(:\d{1,2}){0,2}|(:\d{1,2}){0,2})")
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# These are the launcher's own.
TAKEN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What `unspool launch` was given."""

    recipe: str
    overrides: tuple[str, ...] = ()
    verb: str = "run"
    nodes: int = 1
    gpus: int = 1  # ranks on each node
    on_gpus: bool = True  # False: the recipe says device: cpu
    name: str = "unspool"
    folder: Path = Path()  # where the job starts, the one that paths of the recipe are relative to
    logs: Path = Path("logs")
    python: str = "python"
    env: dict[str, str] = field(default_factory=dict)
    restarts: int = 3
    host: str | None = None
    port: int = PORT
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus: int | None = None
    sbatch: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus

    def __post_init__(self) -> None:
        for option in ("partition", "account", "qos"):
            value = getattr(self, option)
            if value is not None and not WORD.fullmatch(value):
                raise ConfigError(
                    f"--{option} {value!r} is no name that Slurm knows; use letters, digits and _.,:@+/-."
                )
        if self.time is not None and not TIME.fullmatch(self.time):
            raise ConfigError(
                f"--time {self.time!r} is not a time; write minutes, hours:minutes:seconds or days-hours."
            )
        if self.host is not None and not HOST.fullmatch(self.host):
            raise ConfigError(f"--host {self.host!r} is not the name or address of a machine.")
        for option in self.sbatch:
            if not option.startswith("--") or not option.isprintable():
                raise ConfigError(f"--sbatch {option!r} must be one option of sbatch, such as --constraint=h100.")
        for key, value in self.env.items():
            if not KEY.fullmatch(key) or key in TAKEN or "\n" in value or "\0" in value:
                raise ConfigError(
                    f"--env {key}={value!r} cannot be set; a name has letters, digits and _, is none of "
                    f"{', '.join(sorted(TAKEN))}, and its value is one line."
                )


def parse_env(given: list[str]) -> dict[str, str]:
    """`KEY=VALUE` texts."""
    pairs = [text.partition("=") for text in given]
    wrong = [text for text, (_, equals, _) in zip(given, pairs, strict=True) if not equals]
    if wrong:
        raise ConfigError(f"--env {wrong[0]!r} has no '='; write --env KEY=VALUE.")
    return {key: value for key, _, value in pairs}


def unspool_words(ask: Ask) -> list[str]:
    """What every rank runs, after `python`."""
    overrides = [word for text in ask.overrides for word in ("--set", text)]
    return ["-m", "unspool.cli.main", ask.verb, ask.recipe, *overrides]


def torchrun_words(ask: Ask) -> list[str]:
    """The command of one machine of the job."""
    if ask.nodes == 1:
        meeting = ["--standalone"]
    else:
        if ask.host is None:
            raise ConfigError(
                f"--via torchrun on {ask.nodes} nodes needs --host, the name of the first machine as the others know "
                "it; or use --via slurm, which knows it by itself."
            )
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ask.host}:{ask.port}", f"--rdzv-id={ask.name}"]
    return [
        *(ask.python, "-m", "torch.distributed.run"),
        *(f"--nnodes={ask.nodes}", f"--nproc-per-node={ask.gpus}", f"--max-restarts={ask.restarts}"),
        *meeting,
        *unspool_words(ask),
    ]


def torchrun_lines(ask: Ask) -> list[str]:
    """One line for each machine, to be run in the same folder on all of them."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in ask.env.items()]
    line = " ".join([*settings, shlex.join(torchrun_words(ask))])
    return [line] * ask.nodes


def ray_words(ask: Ask) -> list[str]:
    """Run on a machine of the cluster, or handed to `ray job submit -- …`."""
    settings = [word for key, value in ask.env.items() for word in ("--env", f"{key}={value}")]
    return [
        *(ask.python, "-m", "unspool.recipe.ray_job", f"--workers={ask.world_size}"),
        *(["--gpu"] if ask.on_gpus else []),
        *(f"--restarts={ask.restarts}", f"--folder={ask.folder}", *settings),
        *("--", *unspool_words(ask)),
    ]


def slurm_script(ask: Ask) -> str:
    """An sbatch script: one torchrun per node, tried again when a rank fails, requeued when the machines are taken."""
    if any(character.isspace() for character in str(ask.logs)):
        raise ConfigError(
            f"{ask.logs}: Slurm needs a folder for its logs whose path has no spaces; change the recipe's out."
        )
    options = {
        "job-name": ask.name,
        "nodes": ask.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": ask.gpus if ask.on_gpus else None,
        "cpus-per-task": ask.cpus,
        "partition": ask.partition,
        "account": ask.account,
        "qos": ask.qos,
        "time": ask.time,
        "output": f"{ask.logs}/%x-%j.log",
        "open-mode": "append",
        # To the script alone, which hands it on; early enough for a checkpoint.
        "signal": f"B:TERM@{GRACE}",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in ask.sbatch)]
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in ask.env.items())
    return SCRIPT.format(
        options="\n".join(lines),
        folder=shlex.quote(str(ask.folder)),
        exports=exports,
        python=shlex.quote(ask.python),
        nodes=ask.nodes,
        gpus=ask.gpus,
        tries=ask.restarts + 1,
        grace=GRACE,
        port=PORT,
        command=shlex.join(unspool_words(ask)),
    )


SCRIPT = """#!/bin/bash
{options}

cd {folder} || exit 1
{exports}python={python}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({port} + SLURM_JOB_ID % 10000))

stopped=0
step=
code=143
stop() {{ stopped=1; kill -TERM "$step" 2> /dev/null; }}
trap stop TERM

# SIGTERM to torchrun reaches every rank: the running step is finished and saved. Older ones always wait 30 seconds.
grace=()
"$python" -m torch.distributed.run --help | grep -q -e --shutdown-timeout && grace=(--shutdown-timeout={grace})

for try in $(seq {tries}); do
  [ "$stopped" = 1 ] && break
  srun --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 \\
    "$python" -m torch.distributed.run --nnodes={nodes} --nproc-per-node={gpus} --max-restarts=0 "${{grace[@]}}" \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID-$try" \\
    {command} &
  step=$!
  # A signal that came just before found nothing to end.
  [ "$stopped" = 1 ] && stop
  # A signal ends the wait, not what is waited for.
  while true; do wait "$step"; code=$?; kill -0 "$step" 2> /dev/null || break; done
  [ "$code" = 0 ] && exit 0
  [ "$stopped" = 1 ] && break
  echo "try $try of {tries} ended with exit code $code"
done
[ "$stopped" = 1 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


# Whether the stages of a recipe fit so many ranks, before anything is started.


def check_layouts(loaded: LoadedRecipe, world_size: int) -> list[str]:
    """Refuse a stage that cannot be spread over `world_size` ranks."""
    heads = model_heads(loaded)
    lines = []
    for stage in loaded.recipe.stages:
        try:
            layout = settle_layout(stage.parallel, world_size)
            check_layout(layout, work_of(loaded, stage, heads))
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name} on {world_size} ranks: {error}") from None
        lines.append(f"stage {stage.name}: {told(layout)}")
    return lines


def model_heads(loaded: LoadedRecipe) -> tuple[int, int] | None:
    """Query and KV heads of the recipe's model; None where its config is not on this machine."""
    model = loaded.recipe.model
    if not isinstance(model, str):
        shape = SIZES[model.size]
        return shape["num_attention_heads"], shape["num_key_value_heads"]
    ref = loaded.path(model)
    values = cached_config(ref)
    if values is None or "num_attention_heads" not in values:
        return None
    heads = int(values["num_attention_heads"])
    return heads, int(values.get("num_key_value_heads") or heads)


def cached_config(ref: str) -> dict[str, Any] | None:
    if not path_exists(ref):
        # Not the Hub itself: a launcher stands on a login node and must answer at once.
        cached = try_to_load_from_cache(ref, "config.json") if HUB_ID.fullmatch(ref) else None
        if not isinstance(cached, str):
            return None
        ref = str(Path(cached).parent)
    try:
        return config_values(ref)
    except ConfigError:
        return None


def work_of(loaded: LoadedRecipe, stage: StageConfig, heads: tuple[int, int] | None) -> Work:
    degree = stage.parallel.ulysses
    # As many as there are ranks fit any check of heads that cannot be made.
    num_heads, num_kv_heads = heads or (degree, degree)
    rows = [loaded.recipe.datasets[name] for name in stage.mix]
    masks = stage.attention == "intra_document" and not all(
        entry.attention == "full" or entry.chunk_strategy is not None for entry in rows
    )
    return Work(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        context_length=stage.context_length,
        batch_tokens=stage.batch_tokens,
        micro_batch_tokens=stage.micro_batch_tokens or stage.context_length,
        document_masks=masks,
        kv_heads_at_once=stage.attention_heads_at_once if heads else None,
    )


def told(layout: Layout) -> str:
    axes = {name: getattr(layout, name) for name in ("replicate", "shard", "ring", "ulysses")}
    spread = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"
    groups, ranks = format_size(layout.data_ranks), layout.sequence_ranks
    return f"{spread}; {groups} row{'s' * (layout.data_ranks > 1)} at a time, each on {ranks} rank{'s' * (ranks > 1)}"
