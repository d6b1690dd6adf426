"""Export a checkpoint: weights, config, tokenizer and model card in a folder that plain `transformers` loads.

The folder appears only after a fresh process has loaded it and computed the same logits.
"""

import copy
import gc
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from huggingface_hub import hf_hub_download

from unspool.core.artifacts import publish, read_manifest, remove
from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.lock import lock_output
from unspool.models.checks import check_finite
from unspool.models.export import Compared, Pass, check_folder, live_pass, our_passes, round_weights, save_model
from unspool.models.extend import DTYPES, pick_device
from unspool.models.load import load_model
from unspool.models.location import final_model, resolve_path, suggestion
from unspool.models.tokenizer import load_tokenizer
from unspool.models.weight_files import model_digest
from unspool.recipe.hub_upload import HubUpload
from unspool.recipe.run import versions
from unspool.reporting.gather import gather
from unspool.reporting.model_card import CardFacts, Check, render_card
from unspool.reporting.run_results import RunResults

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "export"
CARD = "README.md"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model, with its run and stage if they are known."""

    model: Path
    run_dir: Path | None = None
    stage: str | None = None
    source: str | None = None  # of a model that was saved from memory: where it was loaded from
    live: Callable[[torch.dtype], Pass] | None = None  # and the logits that it computed there


@dataclass(frozen=True, kw_only=True)
class Exported:
    """An exported folder, and how its logits in plain `transformers` compare with ours."""

    folder: Path
    checkpoint: Checkpoint
    dtype: str
    own_code: bool
    num_bytes: int
    checks: list[Compared]
    url: str | None = None  # of the repository on the Hub that it was uploaded to


def find_checkpoint(path: Path, *, stage: str | None = None, run_dir: Path | None = None) -> Checkpoint:
    """Find the checkpoint at `path`: a model, a stage's model, or that of a run's stage: `stage`, or its final one."""
    path = Path(resolve_path(str(path), Path()))  # asset:NAME
    if (path / "model" / "config.json").is_file():
        path = path / "model"
    if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
        own_run, own_stage = _run_of(path.absolute())
        if own_stage and stage not in (None, own_stage):
            raise ConfigError(f"`stage={stage!r}`: {path} is the model of stage {own_stage}; give the run's folder.")
        run_dir, stage = run_dir or own_run, own_stage or stage
        return Checkpoint(model=path, run_dir=run_dir, stage=_finished_stage(run_dir, stage) if run_dir else None)
    if (path / "stages").is_dir():
        stage = _finished_stage(path, stage) if stage else final_model(path).parent.name
        return Checkpoint(model=path / "stages" / stage / "model", run_dir=path, stage=stage)
    problem = "holds no model" if path.exists() else "does not exist"
    raise ConfigError(
        f"{path} {problem}; give a run's folder, one of its stages/, or a folder with config.json."
        f"{'' if path.exists() else suggestion(str(path))}"
    )


def _run_of(model: Path) -> tuple[Path, str] | tuple[None, None]:
    """The run and stage of a model, from its path RUN/stages/STAGE/model."""
    if len(model.parents) < 3 or model.parents[1].name != "stages":
        return None, None
    run_dir = model.parents[2]
    return (run_dir, model.parent.name) if (run_dir / "recipe.yaml").is_file() else (None, None)


def _finished_stage(run_dir: Path, name: str | None) -> str:
    """The stage called `name`, or the last one, for the card of a model; ConfigError if it is not trained."""
    finished = {stage.name: stage for stage in gather(run_dir).stages if stage.finished}
    if not finished:
        raise ConfigError(f"{run_dir}: no stage is trained yet; run the recipe first.")
    return lookup(finished, name or list(finished)[-1], kind="trained stage").name


def check_out(out_dir: Path) -> None:
    """Refuse a folder that holds anything but an export, since an export replaces it."""
    if not out_dir.exists():
        return
    ours = (read_manifest(out_dir) or {}).get("kind") == KIND
    if not out_dir.is_dir() or (any(out_dir.iterdir()) and not ours):
        raise ConfigError(
            f"{out_dir} exists and is not an export of Unspool; give a new folder, so that no files are lost."
        )


def export(
    model: "str | Path | PreTrainedModel",
    path: str | Path,
    *,
    tokenizer: Any = None,
    stage: str | None = None,
    dtype: str | None = None,
    run: str | Path | None = None,
    device: str | torch.device = "auto",
    push: str | None = None,
    private: bool = False,
) -> Exported:
    """Write a model folder that plain `transformers` loads: weights, config, tokenizer and model card.

    Before the folder appears, a fresh process loads it with plain `transformers` and computes logits, also at positions
    beyond the original context length. They must equal ours.

    Args:
        model: A model in memory, a run, one of its `stages/`, or a model folder.
        path: The folder to write; an earlier export there is replaced, anything else is refused.
        tokenizer: Of a model in memory; by default that of the model it was loaded from.
        stage: Stage of the run; by default the one it ends in.
        dtype: `bf16`, `fp32` or `fp16`; by default that of the model.
        run: Run whose recipe and scores the model card shows.
        device: Device of the check: `auto`, `cpu` or `cuda`.
        push: Hub id, such as `me/my-model-64k`, to upload the folder to.
        private: Whether a new repository on the Hub is private.

    Returns:
        The folder, its size and the comparisons.

    Raises:
        UnspoolError: Plain `transformers` computes something else, and nothing was written.
        ConfigError: There is no such model, or the folder is in use.

    Example:
        >>> import tempfile, unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> exported = unspool.export(model, tempfile.mkdtemp() + "/longer", dtype="fp32", device="cpu")
        >>> all(check.passed for check in exported.checks)
        True
    """
    out_dir, target = Path(path), pick_device(device)
    check_out(out_dir)
    upload = None if push is None else HubUpload(push, private=private)
    with ExitStack() as stack:
        if isinstance(model, str | Path):
            checkpoint = find_checkpoint(Path(model), stage=stage, run_dir=None if run is None else Path(run))
        else:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="unspool-"))
            checkpoint = _save_live(model, tokenizer, Path(scratch), run=run, stage=stage)
        stack.enter_context(lock_output(out_dir))
        exported = _write(checkpoint, out_dir, dtype=dtype, device=target)
    return exported if upload is None else replace(exported, url=upload(out_dir))


def _save_live(
    model: "PreTrainedModel", tokenizer: Any, folder: Path, *, run: str | Path | None, stage: str | None
) -> Checkpoint:
    """Save a model in memory as it is, and its logits, with which the export is compared."""
    source = str(getattr(model, "name_or_path", "") or "")
    if tokenizer is None:
        if not source:
            raise ConfigError("export: this model was not loaded from anywhere; give its tokenizer: tokenizer=….")
        tokenizer = load_tokenizer(source)
    run_dir = None if run is None else Path(run)
    was_training = model.training
    model.eval()
    try:
        live = live_pass(model)
    finally:
        model.train(was_training)
    save_model(model, copy.deepcopy(tokenizer), folder, dtype=model.dtype)
    found = _finished_stage(run_dir, stage) if run_dir else None
    return Checkpoint(model=folder, run_dir=run_dir, stage=found, source=source or None, live=live)


def _write(checkpoint: Checkpoint, out_dir: Path, *, dtype: str | None, device: torch.device) -> Exported:
    """Write `checkpoint` to `out_dir` in `dtype` (default: its own), checked before the folder appears."""
    results = gather(checkpoint.run_dir) if checkpoint.run_dir else None
    target = lookup(DTYPES, dtype, kind="`dtype`") if dtype else _own_dtype(checkpoint.model)
    tokenizer = load_tokenizer(str(checkpoint.model))
    model = load_model(str(checkpoint.model), device=device, dtype=torch.float32)
    round_weights(model, target)
    name = str(target).removeprefix("torch.")
    check_finite(model, f"model {checkpoint.model} in {name}")
    passes = [*our_passes(model, target), *([] if checkpoint.live is None else [checkpoint.live(target)])]
    inputs = {"model": model_digest(str(checkpoint.model))}
    with publish(out_dir, kind=KIND, inputs=inputs, settings={"dtype": name, "stage": checkpoint.stage}) as draft:
        try:
            save_model(model, tokenizer, draft.folder, dtype=target)
            # The other process needs the memory.
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            checks = check_folder(draft.folder, passes, tokenizer, device=device)
            config = json.loads((draft.folder / "config.json").read_text())
            facts = _card_facts(out_dir.name, config, checks, checkpoint, results)
            (draft.folder / CARD).write_text(render_card(facts), encoding="utf-8")
            draft.counts = {"bytes": _num_bytes(draft.folder), "checks": [asdict(check) for check in checks]}
        except BaseException:
            remove(draft.folder)
            raise
    return Exported(
        folder=out_dir,
        checkpoint=checkpoint,
        dtype=name,
        own_code="auto_map" in config,
        num_bytes=_num_bytes(out_dir),
        checks=checks,
    )


def _own_dtype(model: Path) -> torch.dtype:
    """The dtype in a folder's config; fp32 if it has none."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return torch.float32
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    return named.get(config.get("dtype") or config.get("torch_dtype"), torch.float32)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _card_facts(
    name: str, config: dict[str, Any], checks: list[Compared], checkpoint: Checkpoint, results: RunResults | None
) -> CardFacts:
    base = _base_model(checkpoint, results)
    return CardFacts(
        name=name,
        config=config,
        checks=[Check(**asdict(check)) for check in checks],
        versions=versions(),
        licence=_license(base) if base else None,
        base_id=base if base and "/" in base and not Path(base).exists() else None,
        results=results,
        stage=checkpoint.stage,
    )


def _base_model(checkpoint: Checkpoint, results: RunResults | None) -> str | None:
    """Folder or Hub id of the base model; the checkpoint itself if the run is not known."""
    if results is None:
        return checkpoint.source or str(checkpoint.model)
    named = yaml.safe_load(results.recipe_text or "model:").get("model") or results.base_model
    return resolve_path(named, results.run_dir) if isinstance(named, str) else None


def _license(base: str) -> str | None:
    """The license in a model's card, in its folder or on the Hub."""
    path = Path(base)
    try:
        card = path / CARD if path.exists() else Path(hf_hub_download(base, CARD, etag_timeout=5))
        _, head, _ = card.read_text(encoding="utf-8").split("---", 2)
        return str(yaml.safe_load(head)["license"])
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return None
