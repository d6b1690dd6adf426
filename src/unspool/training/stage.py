"""One stage, top to bottom: load, resume or start, step until done, export, publish.

In: a model, the rows of a mix, a `StageConfig`. Out: `stages/<name>/` with the model as a Hugging
Face folder, `metrics.jsonl`, `ledger.jsonl` and what a stage that follows goes on from.
Promise: killed at any moment and run again, it ends with the same weights. On several ranks (`parallel`) all go through
this together, on one folder that all of them reach, and the first of them writes; what comes out is what one rank makes
up to rounding, and any number of ranks goes on from what any other has saved.
Price: what cannot be read part by part (loading.py) every rank loads whole into host memory before it keeps its part.
"""

import errno
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from unspool.core.artifacts import digest, publish, read_manifest, stale_reason, write_atomic
from unspool.core.errors import ConfigError, UnspoolError
from unspool.core.sizes import format_count, format_size
from unspool.data.mixture import Mix, epoch_warnings
from unspool.data.packing.store import RowSet, open_rows
from unspool.data.strategies.utk.special_tokens import ALL_KNOTS, add_knots, trained_ids
from unspool.data.tokenize.chat_template import common_template
from unspool.models.checks import check_trainable
from unspool.models.config import NewModel
from unspool.models.export import save_model
from unspool.models.fuse import fuse_parts
from unspool.models.load import build_new, fit_vocabulary, load_model, model_digest
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import load_tokenizer
from unspool.training.checkpoint.resume import CHECKPOINTS, OPTIMIZER, load_trained_weights, resume, save_handover
from unspool.training.checkpoint.save import checkpoints
from unspool.training.config import StageConfig
from unspool.training.distill.distill import FILE as REFIT
from unspool.training.distill.distill import build_distillation, check_refit
from unspool.training.loader import LEDGER
from unspool.training.loop import Training, run_steps
from unspool.training.metrics.logger import METRICS, build_watch, keep_watched
from unspool.training.metrics.trackers import check_trackers
from unspool.training.optim.base import Updater, build_updater
from unspool.training.optim.config import OptimizerConfig
from unspool.training.parallel.apply import load_by_parts, parallelize
from unspool.training.parallel.fsdp import gathered
from unspool.training.parallel.mesh import Team, build_team, one_rank
from unspool.training.parallel.ranks import Ranks
from unspool.training.parallel.requirements import check_fit, model_shape
from unspool.training.spike_guard import Guard

logger = logging.getLogger(__name__)

KIND = "stage"


# Settings that do not change a result but for rounding: how often it is saved and looked at, memory, ranks, what would
# be done about a wrong step (so that a stage which stopped at one can be told to skip it, and goes on).
UNCHANGING = {
    "checkpoint_every",
    "init",
    "guard",
    "loggers",
    "validation",
    "samples",
    "parallel",
    *asdict(MemoryPolicy()),
}


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """What a stage starts from."""

    model: str | NewModel  # folder, GGUF file, Hub id, or a new model
    datasets: dict[str, Path]
    moments: Path | None = None  # an earlier stage's optimizer file
    validation: Path | None = None  # rows that are only looked at
    attention_distillation: dict[str, Path] = field(default_factory=dict)  # rows that queries and keys are refitted on


def run_stage(
    stage: StageConfig,
    inputs: StageInputs,
    out_dir: Path,
    *,
    seed: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> None:
    """Train `stage` unless `out_dir` already holds what it would give. All of `ranks` call this."""
    team = build_team(stage.parallel, ranks or one_rank(device))
    identity = team.from_leader(lambda: _identity(stage, inputs, seed=seed, device=device))
    reason = team.from_leader(lambda: _look(stage, out_dir, identity))
    if reason is None:
        return
    rows = {name: open_rows(folder) for name, folder in inputs.datasets.items()}
    check_fit(stage, inputs.model, rows, world_size=team.ranks.world_size)
    refit_rows = {name: open_rows(folder) for name, folder in inputs.attention_distillation.items()}
    refit_lens = {name: row_set.row_len for name, row_set in refit_rows.items()}
    check_refit(stage, inputs.model, refit_lens, world_size=team.ranks.world_size)
    team.from_leader(lambda: _prepare_work(stage, out_dir, identity))
    work = _work_path(out_dir)
    mix = _mix(stage, inputs, rows, seed=seed)
    handed_on = load_file(inputs.moments) if inputs.moments else {}
    model, tokenizer = _build(stage, inputs, handed_on, seed=seed, device=device, team=team)
    updater, guard = build_updater(stage, model, seed=seed), Guard(stage.guard)
    updater.load_moments(handed_on)
    refit = build_distillation(
        stage,
        model,
        updater,
        refit_rows,
        work,
        seed=seed,
        order=_order(stage, inputs),
        load_teacher=lambda: _load_teacher(inputs, handed_on, device),
    )
    if refit is not None:
        with _disk_is_needed(stage, work):
            refit.before()
    done = resume(work, updater, guard, growing=(LEDGER, METRICS), seed=seed, stage=stage.name, team=team)
    if team.is_leader:
        _announce(stage, mix, reason, done=done, team=team)
    # Files are as they were at the checkpoint before anyone looks at them.
    team.meet()
    with _disk_is_needed(stage, work):
        with build_watch(
            stage,
            model,
            tokenizer,
            work,
            done=done,
            seed=seed,
            rows=inputs.datasets,
            validation=inputs.validation,
            team=team,
        ) as watch:
            aux_loss = refit.during() if refit is not None else None
            training = Training(model, updater, guard, mix, rows, device, team, model_shape(model), aux_loss)
            run_steps(stage, training, work, done=done, watch=watch)
            del training, aux_loss  # and its teacher: `after` loads one of its own
        if refit is not None:
            refit.after()
        team.ranks.outside("exporting", stage.steps)
        _publish(stage, model, tokenizer, updater, work, out_dir, identity, team=team)
        team.meet()


def _look(stage: StageConfig, out_dir: Path, identity: dict[str, Any]) -> str | None:
    """Why there is something to do; None if there is not."""
    reason = stale_reason(out_dir, **identity)
    if reason is None:
        # A kill just after publishing leaves checkpoints behind.
        shutil.rmtree(_work_path(out_dir), ignore_errors=True)
        logger.info(f"stage {stage.name}: up to date")
    return reason


def _prepare_work(stage: StageConfig, out_dir: Path, identity: dict[str, Any]) -> None:
    check_trackers(stage.loggers)
    _work_folder(out_dir, digest(identity))


def stage_reason(
    stage: StageConfig, inputs: StageInputs, out_dir: Path, *, seed: int, device: torch.device
) -> str | None:
    """Why `run_stage` would train; None if `out_dir` is up to date."""
    return stale_reason(out_dir, **_identity(stage, inputs, seed=seed, device=device))


def _mix(stage: StageConfig, inputs: StageInputs, rows: dict[str, RowSet], *, seed: int) -> Mix:
    return Mix(
        stage.mix,
        {name: len(row_set) for name, row_set in rows.items()},
        {name: row_set.row_len for name, row_set in rows.items()},
        stage.context_length,
        seed,
        _order(stage, inputs),
    )


def _order(stage: StageConfig, inputs: StageInputs) -> str:
    """Arms that start from the same model see the same rows; a stage that goes on from another sees new ones."""
    return stage.name if inputs.moments else ""


def _announce(stage: StageConfig, mix: Mix, reason: str, *, done: int, team: Team) -> None:
    ranks = team.ranks
    where = f"{ranks.world_size} × {ranks.device.type}" if ranks.world_size > 1 else ranks.device.type
    resumed = f", resuming after step {done}" if done else ""
    tokens = f"{format_count(stage.steps * stage.batch_tokens)} tokens at {format_size(stage.context_length)}"
    epochs = mix.epochs(stage.steps * stage.batch_tokens // stage.context_length)
    repeated = ", ".join(f"{name} {epoch:.2g}" for name, epoch in epochs.items())
    logger.info(f"stage {stage.name}: {stage.steps} steps, {tokens} on {where} ({reason}{resumed}); epochs: {repeated}")
    for warning in epoch_warnings(epochs):
        logger.warning(f"stage {stage.name}: {warning}")


@contextmanager
def _disk_is_needed(stage: StageConfig, work: Path) -> Iterator[None]:
    """Checkpoints can wait for a disk that is full; the result cannot."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        saved = checkpoints(work / CHECKPOINTS)
        place = (
            f"resumes from {saved[-1].name}" if saved else "begins anew, since no checkpoint could be written either"
        )
        raise UnspoolError(
            f"stage {stage.name}: its result could not be written ({error.strerror}); free some space and run the "
            f"same command again, which {place}."
        ) from error


def _identity(stage: StageConfig, inputs: StageInputs, *, seed: int, device: torch.device) -> dict[str, Any]:
    model = inputs.model
    start = model_digest(model) if isinstance(model, str) else digest(model.model_dump() | {"seed": seed})
    hashes = {
        f"rows {name}": _rows_digest(folder)
        for name, folder in (inputs.datasets | inputs.attention_distillation).items()
    }
    if isinstance(model, NewModel):
        hashes["tokenizer"] = model_digest(model.tokenizer)
    # Memory settings change no result, so `activation_checkpointing` always counts as none; an `optimizer` or
    # `attention_distillation` that is not given is left out.
    own = UNCHANGING | ({"optimizer"} if stage.optimizer == OptimizerConfig() else set())
    own |= {"attention_distillation"} if stage.attention_distillation is None else set()
    settings = stage.model_dump(mode="json", exclude=own) | {"activation_checkpointing": "none"}
    return {
        "kind": KIND,
        "inputs": {"model": start} | hashes,
        "settings": {"stage": settings, "seed": seed, "device": device.type},
    }


def _rows_digest(folder: Path) -> str:
    return digest((read_manifest(folder) or {}).get("files"))


def _work_path(out_dir: Path) -> Path:
    return out_dir.with_name(out_dir.name + ".work")


def _work_folder(out_dir: Path, key: str) -> None:
    """Make the folder of the work in progress; one that belongs to other inputs is thrown away."""
    work = _work_path(out_dir)
    key_path = work / "key"
    if work.exists() and (not key_path.is_file() or key_path.read_text() != key):
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(key_path, key)


def _build(
    stage: StageConfig,
    inputs: StageInputs,
    handed_on: Mapping[str, Tensor],
    *,
    seed: int,
    device: torch.device,
    team: Team,
) -> tuple[Any, Any]:
    """Model in fp32 (the optimizer's precision) and tokenizer, with the stage's positions and tokens."""
    divided = load_by_parts(stage, inputs.model, inputs.datasets, device=device, team=team)
    if divided is not None:
        tokenizer = load_tokenizer(str(inputs.model))
        _take_template(tokenizer, stage, inputs)
        load_trained_weights(divided, handed_on)
        return divided, tokenizer
    # What is to be divided is loaded in host memory, and goes to the device layer by layer.
    place = device if team.mesh is None or _needs_device(stage) else torch.device("cpu")
    if isinstance(inputs.model, NewModel):
        tokenizer = load_tokenizer(inputs.model.tokenizer)
        model = build_new(inputs.model, tokenizer, seed=seed).to(place)
        _bring_knots(model, tokenizer, inputs.datasets)
    else:
        model, tokenizer = _load_start(inputs, inputs.model, place)
    _take_template(tokenizer, stage, inputs)
    apply_rope(model, stage.rope, stage.context_length)
    load_trained_weights(model, handed_on)
    if team.mesh is not None:
        return parallelize(model, team.mesh, stage.parallel, memory=stage.memory, fuse=stage.compile), tokenizer
    if stage.compile:
        fuse_parts(model)
    apply_memory(model, stage.memory)
    return model, tokenizer


def _load_start(inputs: StageInputs, ref: str, device: torch.device) -> tuple[Any, Any]:
    """The model that a stage starts from, with its own positions and the knots that rows need, and its tokenizer."""
    tokenizer = load_tokenizer(ref)
    model = load_model(ref, device=device, dtype=torch.float32)
    check_trainable(model)
    _bring_knots(model, tokenizer, inputs.datasets | inputs.attention_distillation)
    return model, tokenizer


def _load_teacher(inputs: StageInputs, handed_on: Mapping[str, Tensor], device: torch.device) -> Any:
    assert isinstance(inputs.model, str), "a new model has nothing that could be kept"
    model, _ = _load_start(inputs, inputs.model, device)
    load_trained_weights(model, handed_on)
    return model


def _take_template(tokenizer: Any, stage: StageConfig, inputs: StageInputs) -> None:
    template = common_template(inputs.datasets, f"stage {stage.name}")
    if template is not None:
        tokenizer.chat_template = template


def _needs_device(stage: StageConfig) -> bool:
    """Settings that are tried, or make room, on the device that the weights are on."""
    return bool(stage.compile or stage.offload or stage.keep_on_host)


def _bring_knots(model: Any, tokenizer: Any, rows: dict[str, Path]) -> None:
    """Give model and tokenizer the knots that `rows` were tangled with; what they have of them stays as it is."""
    counts = {name: (read_manifest(folder) or {}).get("counts", {}) for name, folder in rows.items()}
    recorded = {name: count["added_tokens"] for name, count in counts.items() if count.get("added_tokens")}
    trained = trained_ids(tokenizer) if recorded else np.zeros(0, dtype=np.int64)
    knots = add_knots(tokenizer, [knot for knot in ALL_KNOTS if any(knot in ids for ids in recorded.values())])
    for name, ids in recorded.items():
        for knot, number in knots.items():
            if ids.get(knot, number) != number:
                raise ConfigError(
                    f"rows {name}: they hold {knot} as token {ids[knot]}, which is token {number} of the model that "
                    "is to be trained on them; make the rows with this model's tokenizer."
                )
    fit_vocabulary(model, set(knots.values()) - set(trained.tolist()), trained)


def _publish(
    stage: StageConfig,
    model: Any,
    tokenizer: Any,
    updater: Updater,
    work: Path,
    out_dir: Path,
    identity: dict[str, Any],
    *,
    team: Team,
) -> None:
    dtype = torch.float32 if team.ranks.device.type == "cpu" else torch.bfloat16
    if stage.export_context_length:
        model.config.max_position_embeddings = stage.export_context_length
    if team.mesh is not None:
        model = gathered(model, dtype=dtype, is_leader=team.is_leader)
    if not team.is_leader:
        save_handover(None, updater, exported=dtype)
        return
    with publish(out_dir, **identity) as draft:
        save_model(model, tokenizer, draft.folder / "model", dtype=dtype)
        save_handover(draft.folder / OPTIMIZER, updater, exported=dtype)
        keep_watched(work, draft.folder)
        shutil.copy(work / LEDGER, draft.folder / LEDGER)
        if (work / REFIT).is_file():
            shutil.copy(work / REFIT, draft.folder / REFIT)
        draft.counts |= {"steps": stage.steps, "tokens": stage.steps * stage.batch_tokens}
    # Only now: a kill before this line costs nothing but the export.
    shutil.rmtree(work)
