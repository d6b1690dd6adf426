"""Run a study: every arm under every seed, one after the other, each a run like any other.

In: a `Study`. Out: its folder: `recipes/`, `shared/`, a run folder per arm and seed, `done/` and `failures/`.
Promise: safe to kill and to run again: a run that is done is known by its record and its manifests and skipped, a
half-done one goes on where it was, a failed one is tried again. One that fails does not stop the others. A run whose
recipe, input files or results have changed since is not taken for done.
Limit: one process; for several devices, `unspool launch` a written recipe, or give each process its own `--only`.
"""

import fcntl
import gc
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from unspool.core.artifacts import MANIFEST, digest, read_manifest, write_atomic
from unspool.core.errors import UnspoolError
from unspool.data.corpus.build import files_digest
from unspool.recipe.paths import path_exists
from unspool.recipe.run import REPORT, open_run
from unspool.recipe.run import run as run_recipe
from unspool.studies.load import Study, StudyRun
from unspool.studies.shared_work import load_written, recipe_digest, share_between_runs, shared_boxes, write_recipes

logger = logging.getLogger(__name__)

DONE, FAILURES = "done", "failures"
State = Literal["finished", "begun", "not begun", "failed", "running elsewhere"]
BOXES = ("corpus", "datasets", "stages", "scores")


@dataclass(frozen=True, kw_only=True)
class RunState:
    run: StudyRun
    state: State
    error: str | None = None


def states(study: Study) -> list[RunState]:
    """How far each run is, from its folder alone."""
    return [_state(study, run) for run in study.runs]


def run_study(study: Study, chosen: Sequence[StudyRun]) -> list[RunState]:
    """Run what is chosen and not done; the state of every run afterwards."""
    write_recipes(study)
    left = [run for run in chosen if not is_done(study, run)]
    if len(left) < len(chosen):
        logger.info(f"{study.name}: {len(chosen) - len(left)} of {len(chosen)} runs are finished")
    began = time.monotonic()
    busy: set[str] = set()
    for at, run in enumerate(left, start=1):
        logger.info(f"\n[{at}/{len(left)}] {run.name}{_eta(began, at - 1, len(left))}")
        with _claimed(study, run) as mine:
            if not mine:
                logger.warning(f"{run.name}: another process is at it; passed over")
                busy.add(run.name)
                continue
            _run_one(study, run)
    return [
        RunState(run=one.run, state="running elsewhere") if one.run.name in busy and one.state != "finished" else one
        for one in states(study)
    ]


def _run_one(study: Study, run: StudyRun) -> None:
    failure = study.out / FAILURES / f"{run.name}.json"
    try:
        run_recipe(open_run(load_written(study, run), share=share_between_runs(study.out)))
    except Exception as error:  # what stops one arm shall not stop the others
        told = str(error) if isinstance(error, UnspoolError) else f"{type(error).__name__}: {error}"
        failure.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(failure, json.dumps({"error": told, "traceback": traceback.format_exc()}, indent=1) + "\n")
        logger.warning(f"{run.name} failed: {told.splitlines()[0]} (all of it in {failure})")
    else:
        _record(study, run)
        failure.unlink(missing_ok=True)
    finally:
        _let_go()


def _let_go() -> None:
    """Leave nothing of an arm to the next: memory, and what torch.compile has kept for other shapes."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was not used
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _eta(began: float, done: int, total: int) -> str:
    if not done:
        return ""
    minutes = (time.monotonic() - began) / done * (total - done) / 60
    return f", about {minutes:.0f} min left for all" if minutes >= 1 else ""


@contextmanager
def _claimed(study: Study, run: StudyRun) -> Iterator[bool]:
    """Whether this process may work on a run: one at a time, until it ends however it ends."""
    folder = study.out / DONE
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{run.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


# What is done


def is_done(study: Study, run: StudyRun) -> bool:
    record = _read(study.out / DONE / f"{run.name}.json")
    return bool(record) and record == _found(study, run) and not _inputs_changed(study, run)


def _record(study: Study, run: StudyRun) -> None:
    folder = study.out / DONE
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{run.name}.json", json.dumps(_found(study, run), indent=1) + "\n")


def _found(study: Study, run: StudyRun) -> dict[str, Any]:
    """What a run was asked to be, and what stands in its folder; a judge may add scores without undoing it."""
    folder = study.run_dir(run)
    boxes = {}
    for path in sorted(found for box in BOXES for found in (folder / box).glob(f"*/{MANIFEST}")):
        manifest = read_manifest(path.parent) or {}
        whole = all((path.parent / name).is_file() for name in manifest.get("files", {}))
        boxes[path.parent.relative_to(folder).as_posix()] = digest(
            [manifest.get("inputs"), manifest.get("settings"), whole]
        )
    return {"recipe": recipe_digest(run.loaded), "report": (folder / REPORT).is_file(), "boxes": boxes}


def _inputs_changed(study: Study, run: StudyRun) -> bool:
    """Whether files that a source reads are others now; those that are not here are taken as they were."""
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


# What a study would do: its runs, their tokens, and what is made once for several of them. Changes nothing.


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
                "tokens": sum(stage.steps * stage.batch_tokens for stage in stages),
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
