"""Run a pipeline's tasks where the recipe's `engine` says.

In: datatrove steps, a work folder, the ranks to run. Out: what the steps write, and completion
markers in the work folder. The three engines differ only in where `Tasks._run_for_rank` is called.
Promise: tasks that an earlier run completed are skipped; the first failed task's own words reach
the caller; a run killed at any moment can be repeated.
Price: a task is repeated whole, so it must write the same files each time, renamed when complete.
Elsewhere: what a task does (tasks.py), the engines (local_tasks.py, slurm_tasks.py, ray_tasks.py).
"""

import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger

from unspool.core.errors import ConfigError, DataError, UnspoolError
from unspool.core.progress import console, progress_bar
from unspool.data.corpus.cluster import RayTasks, SlurmTasks, activation, connected
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.tasks import (
    LocalTasks,
    Tasks,
    clear_errors,
    first_error,
    num_completed,
    only_run,
    wait_for_orphans,
)

_BAR_SECONDS = 0.2


def run_tasks(
    steps: list[PipelineStep], work: Path, *, ranks: range, num_tasks: int, engine: EngineConfig, label: str
) -> None:
    """Run the pipeline for `ranks` (of `num_tasks`), skipping those that an earlier run completed.

    DataError with the first failed task's own message if any fails. Steps keep nothing from one
    task to the next; their paths must hold on every machine of a cluster.
    """
    check_engine(engine)
    logger.disable("datatrove")
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    tasks = _build_tasks(steps, work, ranks, num_tasks, engine)
    with only_run(work), _bar(label, num_tasks, work):
        tasks.wait_for_earlier()
        wait_for_orphans(work)
        clear_errors(work)
        if not tasks.get_incomplete_ranks():
            return
        try:
            tasks.run()
        except Exception as error:
            text = first_error(work)
            if text is None and isinstance(error, UnspoolError):
                raise
            raise DataError(text or f"{type(error).__name__}: {error}") from error
        assert not tasks.get_incomplete_ranks(), "a task neither completed nor failed"


def check_engine(engine: EngineConfig) -> None:
    """ConfigError if the engine cannot run from here."""
    if engine.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "engine.kind=ray: Ray is not installed; `pip install 'unspool[cluster]'`, or use kind: local."
        )
    if engine.kind == "slurm":
        if engine.partition is None:
            raise ConfigError("engine.kind=slurm: engine.partition is missing; `sinfo` lists them, or use kind: local.")
        if "SLURM_ARRAY_TASK_ID" in os.environ:
            raise ConfigError("engine.kind=slurm: this is a task of a Slurm job array itself; use kind: local in it.")
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise ConfigError(
                    f"engine.kind=slurm: there is no command {command} on this machine; "
                    "start Unspool where jobs are submitted, or use kind: local."
                )


@contextmanager
def started(engine: EngineConfig) -> Iterator[None]:
    """Around several calls of `run_tasks`: start once what each of them would start for itself."""
    if engine.kind == "ray":
        check_engine(engine)
        with connected(engine.address, engine.workers):
            yield
    else:
        yield


def _build_tasks(steps: list[PipelineStep], work: Path, ranks: range, num_tasks: int, engine: EngineConfig) -> Tasks:
    workers = min(engine.workers, len(ranks)) or 1
    tasks: Tasks
    if engine.kind == "slurm":
        tasks = SlurmTasks(
            steps,
            tasks=num_tasks,
            workers=workers,
            logging_dir=str(work),
            job_name="unspool",
            partition=engine.partition,
            time=engine.time or "04:00:00",
            cpus_per_task=engine.cpus or 1,
            qos=None,
            env_command=activation(),
            sbatch_args={"mem": f"{engine.memory_gb or 4}G", **engine.sbatch},
        )
        tasks.alone = (engine.cpus or 1) > 1
    elif engine.kind == "ray":
        tasks = RayTasks(steps, tasks=num_tasks, workers=workers, logging_dir=str(work))
        tasks.address = engine.address
    else:
        tasks = LocalTasks(steps, tasks=num_tasks, workers=workers, logging_dir=str(work))
    return tasks.over(ranks, work)


@contextmanager
def _bar(label: str, num_tasks: int, work: Path) -> Iterator[None]:
    """A progress bar that counts completion markers, the one thing all engines leave."""
    if not console.is_terminal:
        yield
        return
    ended = threading.Event()
    with progress_bar(label, num_tasks) as advance:

        def watch() -> None:
            shown = 0
            while True:
                last = ended.wait(_BAR_SECONDS)
                done = num_completed(work)
                advance(done - shown)
                shown = done
                if last:
                    return

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
