"""What a study would do: its runs, their tokens, and what is made once for several of them. Changes nothing."""

from collections.abc import Sequence
from typing import Any

from unspool.recipes.study import Study, StudyRun
from unspool.recipes.study_run import states
from unspool.recipes.study_store import shared_boxes


def study_plan(study: Study, chosen: Sequence[StudyRun]) -> dict[str, Any]:
    """The plan as plain data; `to_run` counts only what is chosen and not finished."""
    found = {one.run.name: one for one in states(study)}
    runs = []
    for run in study.runs:
        stages = run.loaded.recipe.stages
        state = found[run.name]
        runs.append(
            {
                "run": run.name,
                "arm": run.arm,
                "seed": run.seed,
                "state": state.state,
                "error": state.error,
                "will_run": run in chosen and state.state != "finished",
                "stage": run.stage,
                "tokens": sum(stage.steps * stage.batch for stage in stages),
            }
        )
    waiting = [entry for entry in runs if entry["will_run"]]
    boxes: dict[tuple[str, str], list[str]] = {}
    for run in study.runs:
        for box, key in shared_boxes(run.loaded).items():
            boxes.setdefault((box, key), []).append(run.name)
    return {
        "name": study.name,
        "out": str(study.out),
        "baseline": study.baseline,
        "runs": runs,
        "shared": [{"box": box, "key": key, "runs": names} for (box, key), names in boxes.items()],
        "to_run": {"runs": len(waiting), "tokens": sum(entry["tokens"] for entry in waiting)},
        "measures": [measure.name for measure in study.measures],
        "ranked_by": study.compare,
    }
