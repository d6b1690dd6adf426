"""Run a pipeline's tasks on the recipe's `engine`; locally by default.

The engines differ only in where they call `Tasks._run_for_rank`. Besides the output of the steps, the work folder gets
`completions/00003` for a completed task and `error-00003.txt` for a failed one. Completed tasks of an earlier run are
skipped, and the caller gets the message of the first failed task. After a kill, a run can be repeated. A task is always
repeated as a whole, so it must write the same files each time and rename them when they are complete.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self

import multiprocess  # type: ignore[import-untyped]
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.logging import logger
from datatrove.utils.stats import Stats
from multiprocess import forkserver, resource_tracker
from multiprocess.connection import Connection, wait  # type: ignore[import-untyped]

from unspool.core.errors import ConfigError, DataError, UnspoolError, explain, naming
from unspool.core.progress import console, progress_bar
from unspool.data.corpus.config import EngineConfig

_BAR_SECONDS = 0.2
# Seconds that a new run waits for the tasks of a killed run, which end by themselves.
ORPHAN_SECONDS = 30.0
_COMPLETIONS = "completions"


def run_tasks(
    steps: list[PipelineStep], work: Path, *, ranks: range, num_tasks: int, engine: EngineConfig, label: str
) -> None:
    """Run the pipeline for `ranks` (of `num_tasks`), skipping those that an earlier run completed.

    If a task fails, DataError has the message of the first failed task. Steps must not keep state from one task to the
    next, and their paths must be valid on every machine of a cluster.
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
            raise DataError(text or _message(error)) from error
        assert not tasks.get_incomplete_ranks(), "a task neither completed nor failed"


def check_engine(engine: EngineConfig) -> None:
    """Raise ConfigError if this machine cannot start the engine."""
    if engine.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "engine.kind=ray: Ray is not installed; run `pip install 'unspool[cluster]'`, or use kind: local."
        )
    if engine.kind == "slurm":
        if engine.partition is None:
            raise ConfigError(
                "engine.kind=slurm: engine.partition is missing; set one that `sinfo` lists, or use kind: local."
            )
        if "SLURM_ARRAY_TASK_ID" in os.environ:
            raise ConfigError(
                "engine.kind=slurm: this process is already a task of a Slurm job array; use kind: local in it."
            )
        for command in ("sbatch", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise ConfigError(
                    f"engine.kind=slurm: this machine has no command {command}; "
                    "start Unspool on a login node, or use kind: local."
                )


@contextmanager
def started(engine: EngineConfig) -> Iterator[None]:
    """Keep the engine running over several calls of `run_tasks`."""
    if engine.kind == "ray":
        from unspool.data.corpus.cluster import connected

        check_engine(engine)
        with connected(engine.address, engine.workers):
            yield
    else:
        yield


def _build_tasks(steps: list[PipelineStep], work: Path, ranks: range, num_tasks: int, engine: EngineConfig) -> Tasks:
    from unspool.data.corpus.cluster import RayTasks, SlurmTasks, activation

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
    """Show a progress bar that counts completion markers, which all engines write."""
    if not console.is_terminal:
        yield
        return
    ended = threading.Event()
    with progress_bar(label, num_tasks) as advance:

        def watch() -> None:
            shown = 0
            while True:
                last = ended.wait(_BAR_SECONDS)
                done = len(completed_tasks(work))
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


# One task, on any engine


class Tasks(PipelineExecutor):  # type: ignore[misc]
    """Mixin for datatrove's executors, listed before them as a base class; `over` sets the tasks."""

    alone = False  # the only task, which may use every core

    def over(self, ranks: range, work: Path) -> Self:
        self.ranks = ranks
        self.work = work
        self.cwd = Path.cwd()
        return self

    def wait_for_earlier(self) -> None:
        """Wait for tasks that outlived the run that started them, if the executor can have any."""

    def get_incomplete_ranks(self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None) -> list[int]:
        found: list[int] = super().get_incomplete_ranks(self.ranks, skip_completed)
        return found

    def save_executor_as_json(self, indent: int = 4) -> None:
        """Do nothing: the file would hold the whole tokenizer."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        logger.disable("datatrove")
        if not self.alone:
            # The tasks already share the cores.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for step in self.pipeline:
            step.stats = Stats(str(step))  # a process reuses the steps for its next task
        with _locked(self.work / "tasks.lock", fcntl.LOCK_SH):
            try:
                # Not the Ray executor's own method, which logs into a folder shared by all users.
                with naming(self.work.parent):
                    return PipelineExecutor._run_for_rank(self, rank, local_rank, node_rank)
            except Exception as error:
                with suppress(OSError):  # the disk is full; the error itself reports that
                    write_error(self.work, rank, error)
                raise


@contextmanager
def only_run(work: Path) -> Iterator[None]:
    """Lock the folder against other runs; DataError if one is using it."""
    problem = f"{work.parent}: another run is preparing documents here; wait for it to end, or stop it."
    with _locked(work / "run.lock", fcntl.LOCK_EX, seconds=0, problem=problem):
        yield


def wait_for_orphans(work: Path) -> None:
    """Wait until all tasks of a killed run have ended."""
    problem = f"{work.parent}: tasks of an earlier run are still running here; wait for them to end, or stop them."
    with _locked(work / "tasks.lock", fcntl.LOCK_EX, seconds=ORPHAN_SECONDS, problem=problem):
        pass


def completed_tasks(work: Path) -> list[int]:
    try:
        return sorted(int(path.name) for path in (work / _COMPLETIONS).iterdir() if path.name.isdigit())
    except FileNotFoundError:
        return []


def forget_task(work: Path, rank: int) -> None:
    """Mark a completed task as incomplete."""
    (work / _COMPLETIONS / f"{rank:05d}").unlink()


def write_error(work: Path, rank: int, error: Exception) -> None:
    """Write the message for the caller; for a bug, also log the traceback."""
    text = explain(error)
    if text is None:
        log = work / "logs" / f"task_{rank:05d}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as file:
            file.write("".join(traceback.format_exception(error)))
        text = f"task {rank} failed with {type(error).__name__}: {error}; the traceback is in {log}."
    aside = work / f"error-{rank:05d}.tmp"
    aside.write_text(text)
    aside.replace(_error_path(work, rank))


def _message(error: Exception) -> str:
    return explain(error) or f"{type(error).__name__}: {error}"


def first_error(work: Path) -> str | None:
    paths = sorted(work.glob("error-*.txt"))
    return paths[0].read_text() if paths else None


def clear_errors(work: Path) -> None:
    for path in work.glob("error-*.t*"):
        path.unlink()


def _error_path(work: Path, rank: int) -> Path:
    return work / f"error-{rank:05d}.txt"


@contextmanager
def _locked(path: Path, mode: int, *, seconds: float | None = None, problem: str = "") -> Iterator[None]:
    """Hold a file lock, which the kernel releases when the process ends; DataError(problem) after `seconds`."""
    deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
    with path.open("a+b") as file:
        while True:
            try:
                fcntl.flock(file, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DataError(problem) from None
                time.sleep(0.02)
                continue
            except OSError:
                pass  # some network file systems have no locks
            break
        yield


# Tasks in local processes


class LocalTasks(Tasks, LocalPipelineExecutor):  # type: ignore[misc]
    """Replace datatrove's pool, which loads all steps again for every task and hangs when a process dies."""

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        num_workers = min(self.workers, len(ranks))
        if num_workers > 1:
            self._run_in_processes(ranks, num_workers)
            return
        self.alone = True
        for rank in ranks:
            self._run_for_rank(rank)

    def _run_in_processes(self, ranks: Sequence[int], num_workers: int) -> None:
        _start_server(self.pipeline)
        workers: list[_Worker] = []
        try:
            workers.extend(_Worker(self) for _ in range(num_workers))
            waiting = deque(ranks)
            busy = {worker.pipe: worker for worker in workers}
            for worker in workers:
                worker.begin(waiting.popleft())
            while busy:
                for pipe in wait(list(busy)):
                    worker = busy.pop(pipe)
                    worker.finish()
                    if waiting:
                        worker.begin(waiting.popleft())
                        busy[pipe] = worker
        finally:
            for worker in workers:
                worker.process.kill()
            for worker in workers:
                worker.process.join()
                worker.pipe.close()


class _Worker:
    """The parent's handle of a process that runs one task after another."""

    def __init__(self, tasks: LocalTasks) -> None:
        context = multiprocess.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(tasks, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that reading from a dead process returns
        self.rank = -1

    def begin(self, rank: int) -> None:
        self.rank = rank
        try:
            self.pipe.send(rank)
        except OSError:
            self._died()

    def finish(self) -> None:
        try:
            failure = self.pipe.recv()
        except (EOFError, OSError):
            self._died()
        if failure is not None:
            raise DataError(failure)

    def _died(self) -> NoReturn:
        self.process.join()
        code = self.process.exitcode
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise DataError(
            f"the worker process of task {self.rank} {cause}; "
            "if the machine ran out of memory, set a lower engine.workers."
        ) from None


def _serve(tasks: LocalTasks, pipe: Connection) -> None:
    """Run tasks in a worker process until the parent ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        rank = pipe.recv()
        try:
            tasks._run_for_rank(rank)
            pipe.send(None)
        except Exception as error:
            pipe.send(_message(error))


def _end_with_parent() -> None:
    multiprocess.parent_process().join()
    os._exit(1)


def _start_server(steps: Sequence[PipelineStep]) -> None:
    """Start the fork server with all imports done; worker processes are forked from it. It ends with this process."""
    modules: set[Any] = {type(step).__module__ for step in steps}
    multiprocess.set_forkserver_preload(["__main__", __name__, *sorted(modules - {"__main__"})])
    # Ctrl-C reaches all processes of a terminal, but only this one should react; the others inherit the blocked signal.
    # The resource tracker is started first, because starting it unblocks the signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
