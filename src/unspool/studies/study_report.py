"""What a study leaves behind when it ends: study.json, study.md, and one page of all runs side by side.

In: a `Study` and the states of its runs. Out: three files in its folder, and what study.json says.
Promise: only runs that are finished are compared; without checking (`checked=False`) also any whose scores are there
and whose recipe says what the study says. A file is replaced in one step.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unspool import __version__
from unspool.core.artifacts import write_atomic
from unspool.core.errors import ConfigError, UnspoolError
from unspool.recipe.load import load_recipe
from unspool.recipe.run import REPORT
from unspool.reporting.page import write_report
from unspool.studies.arm_comparison import compare_arms
from unspool.studies.arm_scores import Answers, read_answers
from unspool.studies.load import Study, StudyRun
from unspool.studies.result_text import markdown
from unspool.studies.run import RunState
from unspool.studies.shared_work import recipe_digest

logger = logging.getLogger(__name__)

RESULT, TEXT = "study.json", "study.md"


def publish_study(study: Study, found: Sequence[RunState], *, checked: bool) -> dict[str, Any]:
    answers: dict[str, dict[int, Answers]] = {arm: {} for arm in study.arms}
    used: list[StudyRun] = []
    entries = []
    for one in found:
        taken = one.state == "finished" or (not checked and _says_the_same(study, one.run))
        scores = read_answers(study.run_dir(one.run) / "scores" / one.run.stage) if taken else None
        if scores is not None:
            answers[one.run.arm][one.run.seed] = scores
            used.append(one.run)
        entries.append(
            {"run": one.run.name, "arm": one.run.arm, "seed": one.run.seed, "state": one.state, "error": one.error}
            | {"compared": scores is not None}
        )
    contexts = [_context(study.run_dir(run)) for run in used]
    context = next((known for known in contexts if known is not None), None)
    result = {
        "name": study.name,
        "unspool": __version__,
        "context": context,
        "runs": entries,
        **compare_arms(study, answers, context=context),
    }
    study.out.mkdir(parents=True, exist_ok=True)
    result["report"] = _page(study, result, used)
    write_atomic(study.out / RESULT, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    write_atomic(study.out / TEXT, markdown(result))
    return result


def _page(study: Study, result: dict[str, Any], used: Sequence[StudyRun]) -> str | None:
    """The page of `unspool report`, best arm first."""
    order = {entry["arm"]: at for at, entry in enumerate(result["ranking"])}
    folders = [study.run_dir(run) for run in sorted(used, key=lambda run: (order[run.arm], run.seed))]
    if not folders:
        return None
    try:
        write_report(folders, study.out / REPORT)
    except UnspoolError as error:  # the numbers are there and shall not be lost with it
        logger.warning(f"{study.name}: no page was written: {error}")
        return None
    return REPORT


def _says_the_same(study: Study, run: StudyRun) -> bool:
    """Whether a folder was made by this run's recipe, whatever machine it was made on."""
    path = study.run_dir(run) / "recipe.yaml"
    if not path.is_file():
        return False
    try:
        same = recipe_digest(load_recipe(path), paths=False) == recipe_digest(run.loaded, paths=False)
    except ConfigError:
        same = False
    if not same:
        logger.warning(f"{run.name}: its recipe.yaml is not what the study says now; left out")
    return same


def _context(folder: Path) -> int | None:
    try:
        context = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("original_context")
    except (OSError, ValueError):
        return None
    return context if isinstance(context, int) else None
