"""Build the commands and scripts that start a job of several ranks; check its stages against the number of ranks.

Every value is quoted, and values that a scheduler would misread are rejected. Nothing is run here.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from unspool.core.errors import ConfigError
from unspool.core.sizes import format_size
from unspool.models.config import SIZES, config_values
from unspool.models.location import HUB_ID, path_exists
from unspool.recipe.load import LoadedRecipe
from unspool.training.config import StageConfig
from unspool.training.parallel.config import REFUSAL, Layout, Work, check_layout, not_on_ring, settle_layout

PORT = 29400
GRACE = 300  # seconds to finish a step and save a checkpoint when the job is preempted
WORD = re.compile(r"[A-Za-z0-9][\w.,:@+/-]*")
HOST = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
TIME = re.compile(r"\d+(-\d{1,2}(:\d{1,2}){0,2}|(:\d{1,2}){0,2})")
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The launcher sets these itself.
RESERVED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of `unspool launch`."""

    recipe: str
    overrides: tuple[str, ...] = ()
    verb: str = "run"
    nodes: int = 1
    gpus: int = 1  # ranks on each node
    on_gpus: bool = True  # False: the recipe has device: cpu
    name: str = "unspool"
    folder: Path = Path()  # working directory of the job; relative paths in the recipe refer to it
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
                raise ConfigError(f"`{option}={value!r}` is not a valid Slurm name; use letters, digits and _.,:@+/-.")
        if self.time is not None and not TIME.fullmatch(self.time):
            raise ConfigError(
                f"`time={self.time!r}` is not a time; write minutes, hours:minutes:seconds or days-hours."
            )
        if self.host is not None and not HOST.fullmatch(self.host):
            raise ConfigError(f"`host={self.host!r}` is not a host name or address; give one such as node1.")
        for option in self.sbatch:
            if not option.startswith("--") or not option.isprintable():
                raise ConfigError(f"`sbatch={option!r}` must be one option of sbatch, such as --constraint=h100.")
        for key, value in self.env.items():
            if not KEY.fullmatch(key) or key in RESERVED or "\n" in value or "\0" in value:
                raise ConfigError(
                    f"`env`: {key}={value!r} cannot be set; use a name of letters, digits and _ that is none of "
                    f"{', '.join(sorted(RESERVED))}, and a value of one line."
                )


def parse_env(given: list[str]) -> dict[str, str]:
    """Parse `KEY=VALUE` strings."""
    for text in given:
        if "=" not in text:
            raise ConfigError(f"--env {text!r} has no '='; write --env KEY=VALUE.")
    return dict(text.split("=", 1) for text in given)


def rank_command(options: LaunchOptions) -> list[str]:
    """Return the arguments of `python` on every rank."""
    overrides = [word for text in options.overrides for word in ("--set", text)]
    return ["-m", "unspool.cli.main", options.verb, options.recipe, *overrides]


def torchrun_command(options: LaunchOptions) -> list[str]:
    """Return the torchrun command of one node."""
    if options.nodes == 1:
        rendezvous = ["--standalone"]
    else:
        if options.host is None:
            raise ConfigError(
                f"`via='torchrun'` on {options.nodes} nodes needs `host`, the name of the first node. Or use "
                "`via='slurm'`, which finds it automatically."
            )
        rendezvous = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={options.host}:{options.port}",
            f"--rdzv-id={options.name}",
        ]
    return [
        *(options.python, "-m", "torch.distributed.run"),
        *(f"--nnodes={options.nodes}", f"--nproc-per-node={options.gpus}", f"--max-restarts={options.restarts}"),
        *rendezvous,
        *rank_command(options),
    ]


def local_command(options: LaunchOptions, parent: int) -> list[str]:
    """Return the command of a job on this machine; the job ends when its parent process ends."""
    python, module, _, *args = torchrun_command(options)
    return [python, module, "unspool.recipe.torchrun", str(parent), *args]


def torchrun_lines(options: LaunchOptions) -> list[str]:
    """Return one command line per node, to run in the same folder on each node."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in options.env.items()]
    line = " ".join([*settings, shlex.join(torchrun_command(options))])
    return [line] * options.nodes


def ray_command(options: LaunchOptions) -> list[str]:
    """Return the command to run on a node of the cluster, or to pass to `ray job submit -- …`."""
    settings = [word for key, value in options.env.items() for word in ("--env", f"{key}={value}")]
    return [
        *(options.python, "-m", "unspool.recipe.ray_job", f"--workers={options.world_size}"),
        *(["--gpu"] if options.on_gpus else []),
        *(f"--restarts={options.restarts}", f"--folder={options.folder}", *settings),
        *("--", *rank_command(options)),
    ]


def slurm_script(options: LaunchOptions) -> str:
    """An sbatch script: one torchrun per node, restarted when a rank fails, requeued when the job is preempted."""
    if any(character.isspace() for character in str(options.logs)):
        raise ConfigError(f"{options.logs}: Slurm's log folder must not contain spaces; change `out` in the recipe.")
    directives = {
        "job-name": options.name,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": options.gpus if options.on_gpus else None,
        "cpus-per-task": options.cpus,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "output": f"{options.logs}/%x-%j.log",
        "open-mode": "append",
        # Sent to the script only, which forwards it early enough to save a checkpoint.
        "signal": f"B:TERM@{GRACE}",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in directives.items() if value is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in options.sbatch)]
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in options.env.items())
    return SCRIPT.format(
        options="\n".join(lines),
        folder=shlex.quote(str(options.folder)),
        exports=exports,
        python=shlex.quote(options.python),
        nodes=options.nodes,
        gpus=options.gpus,
        tries=options.restarts + 1,
        grace=GRACE,
        port=PORT,
        refusal=f"{REFUSAL}={shlex.quote(str(options.logs))}",
        command=shlex.join(rank_command(options)),
    )


SCRIPT = """#!/bin/bash
{options}

cd {folder} || exit 1
{exports}python={python}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({port} + SLURM_JOB_ID % 10000))
# A rank writes a permanent error here, which a retry would not fix.
export {refusal}/refusal-$SLURM_JOB_ID
rm -f "$UNSPOOL_REFUSAL"

stopped=0
step=
code=143
stop() {{
  stopped=1
  # On SIGTERM, srun kills its tasks at once, so scancel sends the signal to them. Without tasks, nothing needs saving.
  if squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -q -v batch; then
    scancel --signal=TERM "$SLURM_JOB_ID"
  else
    kill -TERM "$step" 2> /dev/null
  fi
}}
trap stop TERM

# torchrun forwards SIGTERM to every rank, which finishes its step and saves. Older versions always wait 30 seconds.
grace=()
"$python" -m torch.distributed.run --help | grep -q -e --shutdown-timeout && grace=(--shutdown-timeout={grace})

for try in $(seq {tries}); do
  [ "$stopped" = 1 ] && break
  srun --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 \\
    "$python" -m torch.distributed.run --nnodes={nodes} --nproc-per-node={gpus} --max-restarts=0 "${{grace[@]}}" \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-id="$SLURM_JOB_ID-$try" \\
    {command} &
  step=$!
  # A signal may have arrived before the step existed.
  [ "$stopped" = 1 ] && stop
  # A signal ends the wait, not the step.
  while true; do wait "$step"; code=$?; kill -0 "$step" 2> /dev/null || break; done
  if [ -s "$UNSPOOL_REFUSAL" ]; then
    echo "error: $(cat "$UNSPOOL_REFUSAL")"
    exit 2
  fi
  [ "$code" = 0 ] && exit 0
  [ "$stopped" = 1 ] && break
  echo "try $try of {tries} ended with exit code $code"
done
[ "$stopped" = 1 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def check_layouts(loaded: LoadedRecipe, world_size: int) -> list[str]:
    """Describe the layout of every stage on `world_size` ranks; ConfigError if a stage does not fit."""
    values = model_values(loaded)
    lines = []
    for stage in loaded.recipe.stages:
        try:
            layout = check_stage(loaded, stage, values, world_size)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name} on {world_size} ranks: {error}") from None
        lines.append(f"stage {stage.name}: {describe_layout(layout)}")
    return lines


def check_stage(loaded: LoadedRecipe, stage: StageConfig, values: Mapping[str, Any] | None, world_size: int) -> Layout:
    """The layout of a stage; ConfigError if it is impossible. `values` is the model's config, None if unknown."""
    layout = settle_layout(stage.parallel, world_size)
    check_layout(layout, work_of(loaded, stage, values))
    problem = stage.ranks_problem() if world_size > 1 else None
    if problem is not None:
        raise ConfigError(problem)
    return layout


def model_values(loaded: LoadedRecipe) -> Mapping[str, Any] | None:
    """Read the config of the recipe's model; None if it is not on this machine."""
    model = loaded.recipe.model
    values = cached_config(loaded.model_path(model)) if isinstance(model, str) else SIZES[model.size]
    return None if values is None or "num_attention_heads" not in values else values


def cached_config(ref: str) -> dict[str, Any] | None:
    """Read the config of a model folder or of a Hub model in the local cache; None if there is none."""
    if not path_exists(ref):
        # Only the local cache: login nodes may have no network.
        cached = try_to_load_from_cache(ref, "config.json") if HUB_ID.fullmatch(ref) else None
        if not isinstance(cached, str):
            return None
        ref = str(Path(cached).parent)
    try:
        return config_values(ref)
    except ConfigError:
        if Path(ref).is_file() or (Path(ref) / "config.json").is_file():
            raise  # the file exists but is damaged
        return None


def work_of(loaded: LoadedRecipe, stage: StageConfig, values: Mapping[str, Any] | None) -> Work:
    # If the number of heads is unknown, assume one per rank, which passes the check.
    heads = int(values["num_attention_heads"]) if values else stage.parallel.ulysses
    rows = [loaded.recipe.datasets[name] for name in stage.mix]
    masks = any(entry.seq_len < stage.context_length for entry in rows) or (
        stage.attention == "intra_document"
        and not all(
            entry.attention == "full" or entry.chunk_strategy is not None or entry.packing == "single_doc"
            for entry in rows
        )
    )
    return Work(
        num_heads=heads,
        num_kv_heads=int((values or {}).get("num_key_value_heads") or heads),
        context_length=stage.context_length,
        batch_tokens=stage.batch_tokens,
        micro_batch_tokens=stage.micro_batch_tokens or stage.context_length,
        document_masks=masks,
        not_on_ring=not_on_ring(values or {}, stage.context_length),
        kv_heads_at_once=stage.attention_heads_at_once if values else None,
    )


def describe_layout(layout: Layout) -> str:
    axes = {name: getattr(layout, name) for name in ("replicate", "shard", "ring", "ulysses")}
    spread = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"
    groups, ranks = format_size(layout.data_ranks), layout.sequence_ranks
    return f"{spread}; {groups} row{'s' * (layout.data_ranks > 1)} at a time, each on {ranks} rank{'s' * (ranks > 1)}"
