"""Run a recipe: tokenize, pack, train, evaluate, report. Each step is a function of a `RunContext`.

A step skips finished folders that are up to date and logs why it rebuilds the others, so a run can be killed and
started again. With several ranks, all of them train; rank 0 does every other step while the others wait.
"""

import logging
import platform
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers

from unspool import __version__
from unspool.core.artifacts import remove
from unspool.core.config import lookup
from unspool.core.errors import ConfigError
from unspool.core.logging import silence
from unspool.evals.averaged_run import is_averaged_model
from unspool.evals.config import EvalConfig
from unspool.evals.eval_plan import EvalPlan
from unspool.evals.run import Scoring, score_model
from unspool.models.config import NewModel, original_context
from unspool.models.extend import pick_device
from unspool.models.weight_files import model_digest
from unspool.recipe.context import RunContext, Share, build_in_place
from unspool.recipe.load import LoadedRecipe
from unspool.recipe.prepare import check_data_inputs, pack, tokenize
from unspool.reporting.comparisons import headline
from unspool.reporting.gather import gather
from unspool.reporting.page import write_report
from unspool.reporting.score_curves import CURVES
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.checkpoint.snapshot import find_snapshots
from unspool.training.config import StageConfig
from unspool.training.distill.distill import check_distillation
from unspool.training.parallel.agreement import require_agreement, version_facts
from unspool.training.parallel.apply import check_fit
from unspool.training.parallel.mesh import single_rank
from unspool.training.parallel.ranks import Ranks
from unspool.training.stage import StageInputs, run_stage, stage_reason

logger = logging.getLogger(__name__)

BASE = "base"
REPORT = "report.html"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result that a run prints at its end."""

    report: Path
    headline: list[str]


def open_run(loaded: LoadedRecipe, ranks: Ranks | None = None, *, share: Share = build_in_place) -> RunContext:
    """Run all checks that need no work, then create the run folder."""
    context = RunContext(loaded=loaded, ranks=ranks or single_rank(pick_device(loaded.recipe.device)), share=share)
    if not context.is_leader:
        silence()  # rank 0 logs for all
    assert context.ranks is not None
    require_agreement(context.ranks, {**context.recipe.model_dump(mode="json", by_alias=True), **version_facts()})
    check_data_inputs(context)
    _check_layouts(context)
    facts = {
        "original_context": _original_context(context),
        "base_model": str(context.recipe.model),
        "versions": versions(),
    }
    context.on_leader(lambda: context.start(**facts))
    return context


def run(context: RunContext) -> Outcome:
    """Run every step of the recipe."""
    logger.info(f"{context.recipe.name}: {_describe_work(context)} on {device_of(context).type}, into {context.out}")
    context.on_leader(lambda: check_evals(context))
    tokenize(context)
    pack(context)
    evaluate(context, BASE)
    for stage in context.recipe.stages:
        train(context, stage)
        evaluate(context, stage.name)
        context.on_leader(partial(_evaluate_snapshots, context, stage))
    return report(context)


def _describe_work(context: RunContext) -> str:
    count = len(context.recipe.stages)
    if count:
        return f"{count} stage{'s' * (count != 1)}"
    return f"no stage to train, only scores of {_base_title(context) or BASE}"


def _base_title(context: RunContext) -> str:
    """Return what messages call the recipe's model; "" for its name `base`."""
    model = context.model
    return "the averaged model" if isinstance(model, str) and is_averaged_model(Path(model)) else ""


def train_stages(context: RunContext, name: str | None = None) -> list[StageConfig]:
    """Prepare the data and train the stage `name`, or all stages in order; return the trained stages."""
    stages = {entry.name: entry for entry in context.recipe.stages}
    chosen = [lookup(stages, name, kind="stage")] if name else list(stages.values())
    tokenize(context)
    pack(context)
    for entry in chosen:
        train(context, entry)
    return chosen


def train(context: RunContext, stage: StageConfig) -> None:
    """Train one stage; the stage that it starts from must match the recipe."""
    previous = _previous(context, stage)
    if previous is not None and previous.name not in context.trained:
        _check_up_to_date(context, previous, needed_by=stage)
    folder = f"stages/{stage.name}"
    with context.timed(folder):
        seconds = run_stage(
            stage,
            stage_inputs(context, stage),
            stage_dir(context, stage.name),
            seed=context.recipe.seed,
            device=device_of(context),
            ranks=context.ranks,
        )
    if seconds is not None:
        context.note(phases=context.notes().get("phases", {}) | {folder: seconds})
    context.trained.add(stage.name)


def evaluate(context: RunContext, name: str) -> None:
    """Score the base model (`base`) or a finished stage; a model trained from scratch has no base model."""
    context.on_leader(lambda: _evaluate(context, name))


def _evaluate(context: RunContext, name: str) -> None:
    ref = context.model if name == BASE else str(stage_dir(context, name) / "model")
    evals = context.loaded.evals(after=name)
    if not evals or isinstance(ref, NewModel):
        return
    context.build(f"scores/{name}", lambda folder: _score(context, ref, name, evals, folder))


def _evaluate_snapshots(context: RunContext, stage: StageConfig) -> None:
    """Score and then delete the models that a stage exported during training."""
    evals = context.loaded.evals(after=stage.name)
    if stage.eval_every is None or not evals:
        return
    for step, model in find_snapshots(stage_dir(context, stage.name)).items():
        name = f"{stage.name}, step {step}"
        folder = context.out / CURVES / stage.name / f"step-{step:06d}"
        _score(context, str(model), name, evals, folder)
        remove(model)


def _score(context: RunContext, ref: str, name: str, evals: list[EvalConfig], folder: Path) -> None:
    device = device_of(context)
    scoring = Scoring(
        model=name,
        model_hash=model_digest(ref),
        evals=evals,
        seed=context.recipe.seed,
        out_dir=folder,
        root=Path(),
        title=_base_title(context) if name == BASE else "",
    )
    score_model(ref, scoring, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def report(context: RunContext) -> Outcome:
    """Write the report page of the run."""

    def write() -> list[str]:
        write_report([context.out], context.out / REPORT)
        return headline(gather(context.out))

    return Outcome(report=context.out / REPORT, headline=context.on_leader(write))


def check_evals(context: RunContext) -> None:
    """Reject a suite that cannot work (too short a text or length) before hours of training."""
    EvalPlan(context.loaded.evals(), context.tokenizer, seed=context.recipe.seed, root=Path()).check()


def _check_layouts(context: RunContext) -> None:
    """Reject a stage that does not fit the ranks of this job before anything is built for it."""
    world_size = context.ranks.world_size if context.ranks else 1
    for stage in context.recipe.stages:
        check_fit(stage, context.model, {}, world_size=world_size)
        distillation = stage.attention_distillation
        seq_lens = {name: context.recipe.datasets[name].seq_len for name in distillation.shares} if distillation else {}
        start = context.model if _previous(context, stage) is None else None
        check_distillation(stage, start, seq_lens, world_size=world_size)


def _original_context(context: RunContext) -> int:
    return original_context(context.model) if isinstance(context.model, str) else context.model.context_length


def _previous(context: RunContext, stage: StageConfig) -> StageConfig | None:
    """Return the stage that `stage` starts from; None if it starts from the recipe's model."""
    names = [other.name for other in context.recipe.stages]
    index = names.index(stage.name)
    init = stage.init
    if init == "previous":
        init = names[index - 1] if index else BASE
    return None if init == BASE else context.recipe.stages[names.index(init)]


def stage_inputs(context: RunContext, stage: StageConfig) -> StageInputs:
    """Return the folders that a stage reads."""
    previous = _previous(context, stage)
    datasets = context.out / "datasets"
    folder = None if previous is None else stage_dir(context, previous.name)
    distillation = stage.attention_distillation
    return StageInputs(
        model=context.model if folder is None else str(folder / "model"),
        datasets={name: datasets / name for name in stage.mix},
        moments=folder and folder / OPTIMIZER,
        validation=datasets / stage.validation.dataset if stage.validation else None,
        attention_distillation={name: datasets / name for name in distillation.shares} if distillation else {},
    )


def _check_up_to_date(context: RunContext, stage: StageConfig, *, needed_by: StageConfig) -> None:
    """Reject weights that no longer match the recipe; do not retrain them, which may take days."""
    folder = stage_dir(context, stage.name)
    if not folder.is_dir():
        raise ConfigError(
            f"stage {needed_by.name} starts from stage {stage.name}, which is not trained yet; train it first."
        )
    previous = _previous(context, stage)
    if previous is not None and previous.name not in context.trained:
        _check_up_to_date(context, previous, needed_by=stage)
    inputs, device = stage_inputs(context, stage), device_of(context)
    reason = context.on_leader(lambda: stage_reason(stage, inputs, folder, seed=context.recipe.seed, device=device))
    if reason is not None:
        raise ConfigError(
            f"stage {needed_by.name} starts from stage {stage.name}, which does not match the recipe ({reason}); train "
            f"it first with `stage={stage.name!r}`, or omit `stage` to train all stages in order."
        )
    context.trained.add(stage.name)


def stage_dir(context: RunContext, name: str) -> Path:
    return context.out / "stages" / name


def device_of(context: RunContext) -> torch.device:
    assert context.ranks is not None, "opened by open_run"
    return context.ranks.device


def versions() -> dict[str, str]:
    """Return versions and hardware, which affect a result in addition to the recipe."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "unspool": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
    }
