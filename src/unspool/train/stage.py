"""One stage, top to bottom: load, resume or start, step until done, export, publish.

In: a model, the rows of a mix, a `StageConfig`. Out: `stages/<name>/` with the model as a Hugging
Face folder, `metrics.jsonl` and the optimizer's moments for a stage that follows.
Promise: killed at any moment and run again, it ends with the same weights.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unspool.base.artefact import digest, publish, read_manifest, stale_reason, write_atomic
from unspool.base.errors import ConfigError
from unspool.base.progress import say
from unspool.base.sizes import format_count, format_size
from unspool.data.knots import ALL_KNOTS, add_knots, trained_ids
from unspool.data.mix import Mix, epoch_warnings
from unspool.data.store import open_rows
from unspool.model.export import save_model
from unspool.model.load import build_new, fit_vocabulary, load_model, model_digest
from unspool.model.memory import apply_memory
from unspool.model.memory_policy import MemoryPolicy
from unspool.model.parts import compile_parts
from unspool.model.rotary import apply_position
from unspool.model.scratch import NewModel
from unspool.model.tokenizer import load_tokenizer
from unspool.model.trial import check_trainable
from unspool.train.checkpoint import OPTIMIZER, load_checkpoint, load_moments, save_moments
from unspool.train.config import StageConfig
from unspool.train.loop import METRICS, Training, run_steps
from unspool.train.optimizer import build_updater

KIND = "stage"


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """What a stage starts from."""

    model: str | NewModel  # folder, GGUF file, Hub id, or a new model
    rows: dict[str, Path]
    moments: Path | None = None  # an earlier stage's optimizer file


def run_stage(stage: StageConfig, inputs: StageInputs, out_dir: Path, *, seed: int, device: torch.device) -> None:
    """Train `stage` unless `out_dir` already holds what it would give."""
    identity = _identity(stage, inputs, seed=seed, device=device)
    reason = stale_reason(out_dir, **identity)
    if reason is None:
        # A kill just after publishing leaves checkpoints behind.
        shutil.rmtree(_work_path(out_dir), ignore_errors=True)
        say(f"stage {stage.name}: up to date")
        return
    work = _work_folder(out_dir, digest(identity))
    rows = {name: open_rows(folder) for name, folder in inputs.rows.items()}
    model, tokenizer = _build(stage, inputs, seed=seed, device=device)
    updater = build_updater(stage, model)
    done = load_checkpoint(work / "checkpoints", model, updater.optimizer)
    if not done and inputs.moments:
        load_moments(inputs.moments, model, updater.optimizer)
    resumed = f", resuming after step {done}" if done else ""
    tokens = f"{format_count(stage.steps * stage.batch)} tokens at {format_size(stage.context)}"
    mix = Mix(
        stage.mix,
        {name: len(row_set) for name, row_set in rows.items()},
        {name: row_set.row_len for name, row_set in rows.items()},
        stage.context,
        seed,
        # Arms that start from the same model see the same rows; a stage that goes on from another sees new ones.
        stage.name if inputs.moments else "",
    )
    epochs = mix.epochs(stage.steps * stage.batch // stage.context)
    repeated = ", ".join(f"{name} {epoch:.2g}" for name, epoch in epochs.items())
    say(f"stage {stage.name}: {stage.steps} steps, {tokens} on {device.type} ({reason}{resumed}); epochs: {repeated}")
    for warning in epoch_warnings(epochs):
        say(f"stage {stage.name}: {warning}")
    run_steps(stage, Training(model, updater, mix, rows, device), work, done=done)
    _publish(stage, model, tokenizer, updater.optimizer, work, out_dir, identity)


def _identity(stage: StageConfig, inputs: StageInputs, *, seed: int, device: torch.device) -> dict[str, Any]:
    model = inputs.model
    start = model_digest(model) if isinstance(model, str) else digest(model.model_dump() | {"seed": seed})
    hashes = {f"rows {name}": _rows_digest(folder) for name, folder in inputs.rows.items()}
    if isinstance(model, NewModel):
        hashes["tokenizer"] = model_digest(model.tokenizer)
    # How often checkpoints are written does not change the result, and neither do memory settings or another GPU.
    # Stages of before these were left out say `recompute`, so it is always said to be none.
    unchanging = {"checkpoint_every", "start", *asdict(MemoryPolicy())}
    settings = stage.model_dump(mode="json", exclude=unchanging) | {"recompute": "none"}
    return {
        "kind": KIND,
        "inputs": {"model": start} | hashes,
        "settings": {"stage": settings, "seed": seed, "device": device.type},
    }


def _rows_digest(folder: Path) -> str:
    return digest((read_manifest(folder) or {}).get("files"))


def _work_path(out_dir: Path) -> Path:
    return out_dir.with_name(out_dir.name + ".work")


def _work_folder(out_dir: Path, key: str) -> Path:
    """The folder of the work in progress; one that belongs to other inputs is thrown away."""
    work = _work_path(out_dir)
    key_path = work / "key"
    if work.exists() and (not key_path.is_file() or key_path.read_text() != key):
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(key_path, key)
    return work


def _build(stage: StageConfig, inputs: StageInputs, *, seed: int, device: torch.device) -> tuple[Any, Any]:
    """Model in fp32 (the optimizer's precision) and tokenizer, with the stage's positions and tokens."""
    if isinstance(inputs.model, NewModel):
        tokenizer = load_tokenizer(inputs.model.tokenizer)
        model = build_new(inputs.model, tokenizer, seed=seed).to(device)
    else:
        tokenizer = load_tokenizer(inputs.model)
        model = load_model(inputs.model, device=device, dtype=torch.float32)
        check_trainable(model)
    _bring_knots(model, tokenizer, inputs.rows)
    apply_position(model, stage.position, stage.context)
    if stage.compile:
        compile_parts(model)
    apply_memory(model, stage.memory)
    return model, tokenizer


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
    optimizer: torch.optim.Optimizer,
    work: Path,
    out_dir: Path,
    identity: dict[str, Any],
) -> None:
    dtype = torch.float32 if next(model.parameters()).device.type == "cpu" else torch.bfloat16
    if stage.claim:
        model.config.max_position_embeddings = stage.claim
    with publish(out_dir, **identity) as draft:
        save_model(model, tokenizer, draft.folder / "model", dtype=dtype)
        save_moments(draft.folder / OPTIMIZER, model, optimizer)
        shutil.copy(work / METRICS, draft.folder / METRICS)
        draft.counts |= {"steps": stage.steps, "tokens": stage.steps * stage.batch}
    # Only now: a kill before this line costs nothing but the export.
    shutil.rmtree(work)
