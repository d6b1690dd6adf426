"""The model of a run, including runs that average weights instead of training (`merge:` in a study)."""

import logging
from functools import cache
from pathlib import Path

from unspool.core.artifacts import read_manifest
from unspool.models.location import CONFIG, exists, model_path, resolve_path
from unspool.models.weight_files import MERGE_KIND

logger = logging.getLogger(__name__)

MODEL = "model"  # folder of an averaged run


def run_model_path(value: str, root: Path) -> str:
    """Return the path of a model or tokenizer; for the folder of a run or stage, the path of its model."""
    run = Path(resolve_path(value, root))
    if not _is_averaged(run):
        return model_path(value, root)
    _announce_once(run, run / MODEL)
    return str(run / MODEL)


def _is_averaged(run: Path) -> bool:
    model = run / MODEL
    if exists(run / CONFIG) or exists(run / "stages") or not exists(model / CONFIG):
        return False
    return is_averaged_model(model)


def is_averaged_model(folder: Path) -> bool:
    """Return whether `unspool merge` wrote this folder."""
    return (read_manifest(folder) or {}).get("kind") == MERGE_KIND


@cache
def _announce_once(run: Path, model: Path) -> None:
    logger.info(f"{run}: using the averaged model in {model}")
