"""Run one stage: load, resume or start, train, export, publish.

Afterwards `stages/<name>/` holds the model as a Hugging Face folder, `metrics.jsonl`, `ledger.jsonl` and the state for
a later stage. A stage that is killed at any moment and rerun ends with the same weights. With `parallel`, all ranks run
this together on a shared folder, and the leader writes. The result equals that of one rank up to rounding, and a run
can resume on any number of ranks. If a model cannot be read shard by shard (parallel/fsdp.py), every rank loads it in
full into host memory.
"""

import errno
import logging
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unspool.core.artifacts import KEY, digest, open_work, publish, read_manifest, remove, stale_reason
from unspool.core.errors import UnspoolError
from unspool.core.phases import Phases
from unspool.core.sizes import format_count, format_size
from unspool.data.mixture import Mix, epoch_warnings
from unspool.data.packing.store import RowSet, open_rows
from unspool.data.tokenize.chat_template import common_template
from unspool.models.checks import check_trainable
from unspool.models.config import NewModel
from unspool.models.export import save_model
from unspool.models.fp8.linear import use_fp8
from unspool.models.fuse import fuse_parts
from unspool.models.load import add_special_tokens, build_new, load_model
from unspool.models.memory.checkpointing import apply_memory, release_host_memory, reserve_host_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.models.rotary import apply_rope
from unspool.models.tokenizer import load_tokenizer
from unspool.models.weight_files import check_written_file, model_digest
from unspool.training.checkpoint.resume import (
    CHECKPOINTS,
    OPTIMIZER,
    load_stage_weights,
    resume,
    save_stage_state,
)
from unspool.training.checkpoint.save import checkpoints
from unspool.training.checkpoint.snapshot import snapshot_writer
from unspool.training.config import StageConfig
from unspool.training.distill.distill import FILE as DISTILLATION
from unspool.training.distill.distill import build_distillation, check_distillation
from unspool.training.host_budget import settle_host_memory
from unspool.training.loader import LEDGER, model_shape
from unspool.training.loop import Training, run_steps
from unspool.training.losses.config import UniformLoss
from unspool.training.metrics.logger import METRICS, build_logger, copy_logs
from unspool.training.metrics.trackers import check_trackers
from unspool.training.metrics.validation import SAMPLES, VALIDATION
from unspool.training.optim.config import AdamWConfig
from unspool.training.optim.updater import Updater, build_updater
from unspool.training.parallel.agreement import dataset_facts, model_facts, require_agreement
from unspool.training.parallel.apply import check_fit, load_sharded, model_values, needs_full_weights, parallelize
from unspool.training.parallel.fsdp import unshard_model
from unspool.training.parallel.mesh import DistContext, build_dist_context, single_rank
from unspool.training.parallel.ranks import Ranks
from unspool.training.schedule import SpikeGuard

logger = logging.getLogger(__name__)

KIND = "stage"
LOGS = (LEDGER, METRICS, VALIDATION, SAMPLES)


# Settings that change a result at most by rounding: saving, validation, memory, ranks. They include the guard, so that
# a stage that stopped at a bad step can resume with a guard that skips it.
NEUTRAL_SETTINGS = {
    "checkpoint_every",
    "eval_every",
    "init",
    "guard",
    "loggers",
    "validation",
    "samples",
    "parallel",
    "reported",
    *asdict(MemoryPolicy()),
}


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """The input files of a stage."""

    model: str | NewModel  # folder, GGUF file, Hub id, or a new model
    datasets: dict[str, Path]
    moments: Path | None = None  # optimizer file of the stage that this one continues
    validation: Path | None = None  # held-out rows
    attention_distillation: dict[str, Path] = field(default_factory=dict)  # rows of attention distillation


def run_stage(
    stage: StageConfig,
    inputs: StageInputs,
    out_dir: Path,
    *,
    seed: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> dict[str, float] | None:
    """Train `stage` and return its seconds by phase, or None if `out_dir` is up to date. All of `ranks` call this."""
    phases = Phases()
    dist_context = build_dist_context(stage.parallel, ranks or single_rank(device))
    world_size = dist_context.ranks.world_size
    with phases("checks"):
        require_agreement(dist_context.ranks, _facts(stage, inputs, seed=seed))
        identity = dist_context.from_leader(lambda: _identity(stage, inputs, seed=seed, device=device))
        reason = dist_context.from_leader(lambda: _find_work(stage, out_dir, identity))
        if reason is None:
            return None
        rows = {name: open_rows(folder) for name, folder in inputs.datasets.items()}
        layout = check_fit(stage, inputs.model, rows, world_size=world_size)
        stage = settle_host_memory(
            stage,
            inputs.model,
            model_values(inputs.model),
            dist_context,
            sequence_ranks=layout.sequence_ranks,
            num_shards=layout.shard * layout.sequence_ranks,
            loads_full=dist_context.mesh is None or needs_full_weights(stage, inputs.datasets),
        )
        distilled_rows = {name: open_rows(folder) for name, folder in inputs.attention_distillation.items()}
        distilled_lens = {name: row_set.row_len for name, row_set in distilled_rows.items()}
        check_distillation(stage, inputs.model, distilled_lens, world_size=world_size)
        if inputs.moments:
            check_written_file(inputs.moments)
        measured = dist_context.from_leader(lambda: stage.loss.measure(stage, rows))
        loss_weights = stage.loss.build(stage, measured)
        dist_context.from_leader(lambda: _prepare_work(stage, out_dir, identity))
    work = _work_path(out_dir)
    mix = _mix(stage, inputs, rows, seed=seed)
    with phases("load"):
        stage_state = load_file(inputs.moments) if inputs.moments else {}
        model, tokenizer = _build(stage, inputs, stage_state, seed=seed, device=device, dist_context=dist_context)
        updater, guard = build_updater(stage, model, seed=seed), SpikeGuard(stage.guard)
        updater.load_optimizer(stage_state if stage.optimizer_state == "keep" else {})
    distillation = build_distillation(
        stage,
        model,
        updater,
        distilled_rows,
        work,
        seed=seed,
        order=_order(stage, inputs),
        load_teacher=lambda: _load_teacher(inputs, stage_state, device),
    )
    if distillation is not None:
        with _require_disk(stage, work), phases("distillation"):
            distillation.before()
    with phases("resume"):
        done = resume(work, updater, guard, logs=LOGS, seed=seed, stage=stage.name, dist_context=dist_context)
    reserve_host_memory(model, stage.memory, tokens=-(-stage.tokens_per_pass // layout.sequence_ranks))
    if dist_context.is_leader:
        _announce(stage, mix, reason, done=done, dist_context=dist_context)
        about_weights = stage.loss.describe(measured)
        if about_weights:
            logger.info(f"stage {stage.name}: {about_weights}")
    # No rank reads the logs before the leader has truncated them to the checkpoint.
    dist_context.barrier()
    with _require_disk(stage, work):
        with build_logger(
            stage,
            model,
            tokenizer,
            work,
            done=done,
            seed=seed,
            rows=inputs.datasets,
            validation=inputs.validation,
            dist_context=dist_context,
        ) as metrics:
            aux_loss = distillation.during() if distillation is not None else None
            training = Training(
                model, updater, guard, mix, rows, device, dist_context, model_shape(model), aux_loss, loss_weights
            )
            snapshot = snapshot_writer(stage, model, tokenizer, out_dir, dist_context)
            run_steps(stage, training, work, done=done, metrics=metrics, snapshot=snapshot)
            phases.seconds |= metrics.phases.seconds
            del training, aux_loss  # frees the teacher: `after` loads its own
        if distillation is not None:
            with phases("distillation"):
                distillation.after()
        dist_context.ranks.leave_step("exporting", stage.steps)
        with phases("export"):
            release_host_memory(model)
            _publish(stage, model, tokenizer, updater, work, out_dir, identity, dist_context=dist_context)
            dist_context.barrier()
    if dist_context.is_leader:
        logger.info(f"stage {stage.name}: finished in {phases.text()}")
    return phases.rounded()


def _facts(stage: StageConfig, inputs: StageInputs, *, seed: int) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks, without reading weights."""
    folders = inputs.datasets | inputs.attention_distillation
    folders |= {"of validation": inputs.validation} if inputs.validation else {}
    model = inputs.model
    return {
        f"stage {stage.name}": stage.model_dump(mode="json"),
        "seed": seed,
        **dataset_facts(folders),
        **(model_facts(model) if isinstance(model, str) else {"model": model.model_dump(mode="json")}),
    }


def _find_work(stage: StageConfig, out_dir: Path, identity: dict[str, Any]) -> str | None:
    """Return why the stage must be trained; None if it is up to date."""
    reason = stale_reason(out_dir, **identity)
    if reason is None:
        # A kill just after publishing leaves checkpoints behind; the work of another recipe is kept.
        work = _work_path(out_dir)
        if (work / KEY).is_file() and (work / KEY).read_text() == digest(identity):
            remove(work)
        logger.info(f"stage {stage.name}: up to date")
    return reason


def _prepare_work(stage: StageConfig, out_dir: Path, identity: dict[str, Any]) -> None:
    check_trackers(stage.loggers)
    open_work(_work_path(out_dir), digest(identity), label=f"stage {stage.name}", describe=_describe_work)


def stage_reason(
    stage: StageConfig, inputs: StageInputs, out_dir: Path, *, seed: int, device: torch.device
) -> str | None:
    """Return why `run_stage` would train; None if `out_dir` is up to date."""
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
    """Return the order of rows: the same for stages with the same starting model, new for a continued stage."""
    return stage.name if inputs.moments else ""


def _announce(stage: StageConfig, mix: Mix, reason: str, *, done: int, dist_context: DistContext) -> None:
    ranks = dist_context.ranks
    where = f"{ranks.world_size} × {ranks.device.type}" if ranks.world_size > 1 else ranks.device.type
    resumed = f", resuming after step {done}" if done else ""
    tokens = f"{format_count(stage.steps * stage.batch_tokens)} tokens at {format_size(stage.context_length)}"
    epochs = mix.epochs(stage.steps * stage.batch_tokens // stage.context_length)
    repeated = ", ".join(f"{name} {epoch:.2g}" for name, epoch in epochs.items())
    logger.info(f"stage {stage.name}: {stage.steps} steps, {tokens} on {where} ({reason}{resumed}); epochs: {repeated}")
    for warning in epoch_warnings(epochs):
        logger.warning(f"stage {stage.name}: {warning}")


@contextmanager
def _require_disk(stage: StageConfig, work: Path) -> Iterator[None]:
    """Turn a full disk into a message. Checkpoints can be skipped, but the result cannot."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        saved = checkpoints(work / CHECKPOINTS)
        start = f"resumes from {saved[-1].name}" if saved else "restarts, because there is no checkpoint either"
        raise UnspoolError(
            f"stage {stage.name}: cannot write its result ({error.strerror}); free some space and rerun the same "
            f"command, which {start}."
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
    # Memory settings change no result, so `activation_checkpointing` is always recorded as none. Defaults of keys that
    # were added later are omitted.
    defaults = {
        "optimizer": AdamWConfig(),
        "attention_distillation": None,
        "optimizer_state": "keep",
        "precision": "bf16",
        "bf16_layers": 0,
        "loss": UniformLoss(),
        "schedule": "cosine",
    }
    own = NEUTRAL_SETTINGS | {key for key, default in defaults.items() if getattr(stage, key) == default}
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


def _describe_work(work: Path) -> str | None:
    saved = checkpoints(work / CHECKPOINTS)
    return f"{int(saved[-1].name.removeprefix('step-'))} trained steps" if saved else None


def _build(
    stage: StageConfig,
    inputs: StageInputs,
    stage_state: Mapping[str, Tensor],
    *,
    seed: int,
    device: torch.device,
    dist_context: DistContext,
) -> tuple[Any, Any]:
    """Build the fp32 model and the tokenizer, with the stage's RoPE settings and special tokens."""
    sharded = load_sharded(stage, inputs.model, inputs.datasets, device=device, dist_context=dist_context)
    if sharded is not None:
        tokenizer = load_tokenizer(str(inputs.model))
        _take_template(tokenizer, stage, inputs)
        load_stage_weights(sharded, stage_state)
        return sharded, tokenizer
    # A model to be sharded is loaded into host memory, and moved to the device layer by layer.
    mesh = dist_context.mesh
    load_device = device if mesh is None else torch.device("cpu")
    if isinstance(inputs.model, NewModel):
        tokenizer = load_tokenizer(inputs.model.tokenizer)
        model = build_new(inputs.model, tokenizer, seed=seed).to(load_device)
        add_special_tokens(model, tokenizer, inputs.datasets)
    else:
        model, tokenizer = _load_start(inputs, inputs.model, load_device)
    _take_template(tokenizer, stage, inputs)
    apply_rope(model, stage.rope, stage.context_length)
    load_stage_weights(model, stage_state)
    if mesh is not None:
        return parallelize(model, mesh, stage.parallel, memory=stage.memory, fuse=stage.compile), tokenizer
    if stage.compile:
        fuse_parts(model)
    if stage.precision == "fp8":
        use_fp8(model, bf16_layers=stage.bf16_layers)
    apply_memory(model, stage.memory)
    return model, tokenizer


def _load_start(inputs: StageInputs, ref: str, device: torch.device) -> tuple[Any, Any]:
    """Load a stage's starting model with its own RoPE and the rows' special tokens, and its tokenizer."""
    tokenizer = load_tokenizer(ref)
    model = load_model(ref, device=device, dtype=torch.float32)
    check_trainable(model)
    add_special_tokens(model, tokenizer, inputs.datasets | inputs.attention_distillation)
    return model, tokenizer


def _load_teacher(inputs: StageInputs, stage_state: Mapping[str, Tensor], device: torch.device) -> Any:
    assert isinstance(inputs.model, str), "a new model cannot be a teacher"
    model, _ = _load_start(inputs, inputs.model, device)
    load_stage_weights(model, stage_state)
    return model


def _take_template(tokenizer: Any, stage: StageConfig, inputs: StageInputs) -> None:
    template = common_template(inputs.datasets, f"stage {stage.name}")
    if template is not None:
        tokenizer.chat_template = template


def _publish(
    stage: StageConfig,
    model: Any,
    tokenizer: Any,
    updater: Updater,
    work: Path,
    out_dir: Path,
    identity: dict[str, Any],
    *,
    dist_context: DistContext,
) -> None:
    dtype = torch.float32 if dist_context.ranks.device.type == "cpu" else torch.bfloat16
    if stage.export_context_length:
        model.config.max_position_embeddings = stage.export_context_length
    if dist_context.mesh is not None:
        model = unshard_model(model, dtype=dtype, is_leader=dist_context.is_leader)
    if not dist_context.is_leader:
        save_stage_state(None, updater, exported=dtype)
        return
    with publish(out_dir, **identity) as draft:
        with ThreadPoolExecutor(1, "unspool-export") as pool:
            saving = pool.submit(save_model, model, tokenizer, draft.folder / "model", dtype=dtype)
            save_stage_state(draft.folder / OPTIMIZER, updater, exported=dtype)
            saving.result()
        copy_logs(work, draft.folder)
        shutil.copy(work / LEDGER, draft.folder / LEDGER)
        if (work / DISTILLATION).is_file():
            shutil.copy(work / DISTILLATION, draft.folder / DISTILLATION)
        draft.counts |= {"steps": stage.steps, "tokens": stage.steps * stage.batch_tokens}
    # Last, so that a kill before this line costs only the export.
    remove(work)
