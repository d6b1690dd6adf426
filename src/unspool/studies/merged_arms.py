"""Arms that are not trained: their weights are the average of a trained arm's and those of the recipe's model.

The recipe of such a run has no stages. Its model is a folder that the study writes once the other arm is trained. Its
evaluations are those of that arm, with the same questions.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.core.artifacts import find_damage, read_manifest, write_atomic
from unspool.core.errors import BusyError, ConfigError, UnspoolError
from unspool.core.lock import LOCK
from unspool.evals.averaged_run import MODEL
from unspool.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from unspool.studies.load import Study, StudyRun

logger = logging.getLogger(__name__)

BASE = "base"  # a run without stages has only the scores of its model


def merged_recipe(trained: LoadedRecipe, stage: str, *, name: str, folder: Path) -> LoadedRecipe:
    """Return the recipe that scores a merged model as the recipe `trained` scores its stage."""
    recipe = trained.recipe
    evals = [
        entry.model_copy(update={"after": [BASE]})
        for entry in recipe.evals
        if entry.after is None or stage in entry.after
    ]
    changes: dict[str, Any] = {"stages": [], "datasets": {}, "sources": {}, "synth": {}, "evals": evals}
    changes |= {"name": name, "out": folder / name, "model": str((folder / name / MODEL).absolute())}
    return replace(trained, recipe=recipe.model_copy(update=changes))


def source_of(study: "Study", run: "StudyRun") -> "StudyRun":
    """Return the trained run whose weights a merged run averages with those of the recipe's model."""
    assert run.merge is not None
    return next(one for one in study.runs if (one.arm, one.seed) == (run.merge.arm, run.seed))


def check_sources(study: "Study", chosen: Sequence["StudyRun"]) -> None:
    """Reject merged runs whose trained run is neither finished nor chosen."""
    from unspool.studies.run import is_done  # import late: it loads torch

    for run in chosen:
        source = source_of(study, run) if run.merge else run
        if source not in chosen and not is_done(study, source):
            raise ConfigError(
                f"`only={run.name!r}`: it averages the weights of {source.name}, which is not trained yet; add "
                f"{source.name}, or run it first."
            )


def merge_weights(study: "Study", run: "StudyRun") -> bool:
    """Write the model of a merged run, unless it is up to date; return whether the run can be scored.

    A merge that fails is recorded as the failure of the run, so that it does not stop the other arms.
    """
    from unspool.studies.run import DONE, FAILURES, is_done

    source, out = source_of(study, run), Path(str(run.loaded.recipe.model))
    if is_done(study, run) and not (out.is_dir() and is_done(study, source)):
        return False  # scored earlier; its weights were deleted since
    if not is_done(study, source):
        logger.warning(f"{run.name}: skipping, because {source.name}, whose weights it averages, is not finished")
        return False
    try:
        written = _write(study, source, run, out)
    except BusyError as error:
        logger.warning(f"{run.name}: skipping, because {error}")
        return False
    except UnspoolError as error:
        logger.warning(f"{run.name} failed: {error}")
        failure = study.out / FAILURES / f"{run.name}.json"
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(failure, json.dumps({"error": str(error)}, indent=1) + "\n")
        return False
    logger.info(f"{run.name}: no stage is trained; scores/base holds the scores of the averaged model")
    if written:  # a record of earlier scores is about other weights
        (study.out / DONE / f"{run.name}.json").unlink(missing_ok=True)
    return True


def _write(study: "Study", source: "StudyRun", run: "StudyRun", out: Path) -> bool:
    """Write the averaged weights; return False if they are up to date."""
    from unspool.models.merge import merge
    from unspool.models.weight_files import model_digest

    assert run.merge is not None
    first = str(study.run_dir(source) / "stages" / source.stage / "model")
    second = source.loaded.model_path(str(source.loaded.recipe.model))
    inputs = {"first": model_digest(first)} | ({"second": model_digest(second)} if Path(second).is_dir() else {})
    manifest = read_manifest(out) or {}
    same = inputs.items() <= (manifest.get("inputs") or {}).items()
    if same and manifest.get("settings") == {"weight": run.merge.weight} and find_damage(out) is None:
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    (out.parent / LOCK).touch()  # so that merge() locks this run, not the study, which this process has locked
    logger.info(f"{run.name}: {run.merge.weight:g} × {source.name} + {1 - run.merge.weight:g} × {second}")
    merge(first, second, weight=run.merge.weight, out=out)
    return True
