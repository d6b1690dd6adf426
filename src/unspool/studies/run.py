"""Run a study: every arm with every seed, one after the other.

A finished run is skipped unless its recipe, input files or results have changed. An unfinished run resumes, and a
failed run is repeated. A failure does not stop the other runs. A study runs in one process. For several devices, use
`unspool launch` with a written recipe, or start several processes with `--only`.
"""

import gc
import json
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from unspool.core.artifacts import MANIFEST, digest, read_manifest, write_atomic
from unspool.core.errors import BusyError, explain
from unspool.core.lock import LOCK, lock_run, wait_for_lock
from unspool.data.corpus.build import files_digest
from unspool.models.location import path_exists
from unspool.recipe.run import REPORT, open_run
from unspool.recipe.run import run as run_recipe
from unspool.studies.load import Study, StudyRun
from unspool.studies.shared_work import (
    RECIPES,
    load_written,
    recipe_digest,
    share_between_runs,
    shared_folders,
    write_recipes,
)

logger = logging.getLogger(__name__)

DONE, FAILURES = "done", "failures"
State = Literal["finished", "begun", "not begun", "failed", "running elsewhere"]
STEPS = ("corpus", "datasets", "stages", "scores")


@dataclass(frozen=True, kw_only=True)
class RunState:
    run: StudyRun
    state: State
    error: str | None = None


def states(study: Study) -> list[RunState]:
    """Return the state of each run, from its folder alone."""
    return [_state(study, run) for run in study.runs]


def run_study(study: Study, chosen: Sequence[StudyRun]) -> list[RunState]:
    """Run the chosen runs that are not finished; return the state of every run of the study."""
    with wait_for_lock(study.out / RECIPES / LOCK):
        write_recipes(study)
    left = [run for run in chosen if not is_done(study, run)]
    if len(left) < len(chosen):
        logger.info(f"{study.name}: {len(chosen) - len(left)} of {len(chosen)} runs are finished")
    began = time.monotonic()
    busy: set[str] = set()
    for at, run in enumerate(left, start=1):
        logger.info(f"\n[{at}/{len(left)}] {run.name}{_eta(began, at - 1, len(left))}")
        try:
            with lock_run(study.run_dir(run)):
                _run_one(study, run)
        except BusyError as error:
            logger.warning(f"{run.name}: skipping, because {error}")
            busy.add(run.name)
    return [
        RunState(run=one.run, state="running elsewhere") if one.run.name in busy and one.state != "finished" else one
        for one in states(study)
    ]


def _run_one(study: Study, run: StudyRun) -> None:
    failure = study.out / FAILURES / f"{run.name}.json"
    try:
        run_recipe(open_run(load_written(study, run), share=share_between_runs(study.out)))
    except Exception as error:  # a failure must not stop the other arms
        message = explain(error) or f"{type(error).__name__}: {error}"
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(failure, json.dumps({"error": message, "traceback": traceback.format_exc()}, indent=1) + "\n")
        logger.warning(f"{run.name} failed: {message.splitlines()[0]} (traceback: {failure})")
    else:
        _record(study, run)
        failure.unlink(missing_ok=True)
    finally:
        _free_memory()


def _free_memory() -> None:
    """Free memory before the next arm, and drop what torch.compile cached for other shapes."""
    gc.collect()
    torch.cuda.empty_cache()  # no effect without CUDA
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _eta(began: float, done: int, total: int) -> str:
    if not done:
        return ""
    minutes = (time.monotonic() - began) / done * (total - done) / 60
    return f", about {minutes:.0f} min left in total" if minutes >= 1 else ""


def is_done(study: Study, run: StudyRun) -> bool:
    record = _read(study.out / DONE / f"{run.name}.json")
    return bool(record) and record == _describe_run(study, run) and not _inputs_changed(study, run)


def _record(study: Study, run: StudyRun) -> None:
    folder = study.out / DONE
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{run.name}.json", json.dumps(_describe_run(study, run), indent=1) + "\n")


def _describe_run(study: Study, run: StudyRun) -> dict[str, Any]:
    """Return digests of a run's recipe and results. Scores that a judge adds later do not change them."""
    folder = study.run_dir(run)
    results = {}
    for path in sorted(found for step in STEPS for found in (folder / step).glob(f"*/{MANIFEST}")):
        manifest = read_manifest(path.parent) or {}
        whole = all((path.parent / name).is_file() for name in manifest.get("files", {}))
        results[path.parent.relative_to(folder).as_posix()] = digest(
            [manifest.get("inputs"), manifest.get("settings"), whole]
        )
    return {"recipe": recipe_digest(run.loaded), "report": (folder / REPORT).is_file(), "results": results}


def _inputs_changed(study: Study, run: StudyRun) -> bool:
    """Return whether input files of a source have changed; missing files count as unchanged."""
    for path in (study.run_dir(run) / "corpus").glob(f"*/{MANIFEST}"):
        source = run.loaded.recipe.sources[path.parent.name]
        resolved = source.with_paths(run.loaded.path)
        if not source.paths or not all(map(path_exists, resolved.paths.values())):
            continue
        if files_digest(resolved, Path()) != (read_manifest(path.parent) or {}).get("inputs", {}).get("files"):
            return True
    return False


def _state(study: Study, run: StudyRun) -> RunState:
    if is_done(study, run):
        return RunState(run=run, state="finished")
    failure = _read(study.out / FAILURES / f"{run.name}.json")
    if failure:
        return RunState(run=run, state="failed", error=str(failure.get("error")))
    return RunState(run=run, state="begun" if study.run_dir(run).exists() else "not begun")


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def study_plan(study: Study, chosen: Sequence[StudyRun]) -> dict[str, Any]:
    """Return the plan of a study for `--dry-run`; `to_run` counts only chosen runs that are not finished."""
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
                "tokens": sum(stage.steps * stage.batch_tokens for stage in stages),
            }
        )
    waiting = [entry for entry in runs if entry["will_run"]]
    shared: dict[tuple[str, str], list[str]] = {}
    for run in study.runs:
        for folder, key in shared_folders(run.loaded).items():
            shared.setdefault((folder, key), []).append(run.name)
    return {
        "name": study.name,
        "out": str(study.out),
        "baseline": study.baseline,
        "runs": runs,
        "shared": [{"folder": folder, "key": key, "runs": names} for (folder, key), names in shared.items()],
        "to_run": {"runs": len(waiting), "tokens": sum(entry["tokens"] for entry in waiting)},
        "measures": [measure.name for measure in study.measures],
        "ranked_by": study.compare,
    }
