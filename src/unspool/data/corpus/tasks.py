"""What a task does wherever it runs: one rank of a pipeline, quietly, with its failure written down.

In: an executor of datatrove's, mixed with `Tasks`. Out: beside what the steps write, in the work
folder `completions/00003` for a task that is done, `error-00003.txt` for one that failed.
Promise: while tasks of an earlier run may still write into the folder, no new run begins there.
Price: where the file system knows no locks, that promise rests on killed runs ending their tasks.
Elsewhere: where tasks run (local_tasks.py, slurm_tasks.py, ray_tasks.py), who calls (executors.py).
"""

import fcntl
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from unspool.core.errors import DataError, UnspoolError

# How long a new run waits for tasks of a killed one; they end by themselves as soon as they notice.
ORPHAN_SECONDS = 30.0
_COMPLETIONS = "completions"


class Tasks(PipelineExecutor):  # type: ignore[misc]
    """Mixed into datatrove's executors, before them; `over` says which tasks there are."""

    alone = False  # whether a task may use every core, since no other runs beside it

    def over(self, ranks: range, work: Path) -> Self:
        self.ranks = ranks
        self.work = work
        self.cwd = Path.cwd()
        return self

    def wait_for_earlier(self) -> None:
        """For executors whose tasks outlive the run that began them."""

    def get_incomplete_ranks(self, ranks: Iterable[int] | None = None, skip_completed: bool | None = None) -> list[int]:
        found: list[int] = super().get_incomplete_ranks(self.ranks, skip_completed)
        return found

    def save_executor_as_json(self, indent: int = 4) -> None:
        """Left out: it would spell out the whole tokenizer."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        logger.disable("datatrove")
        if not self.alone:
            # The tasks share the cores among them already.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for step in self.pipeline:
            step.stats = Stats(str(step))  # a process keeps its steps from one task to the next
        with _locked(self.work / "tasks.lock", fcntl.LOCK_SH):
            try:
                # Not the Ray executor's own version: its logs pass through a folder that all users share.
                return PipelineExecutor._run_for_rank(self, rank, local_rank, node_rank)
            except Exception as error:
                write_error(self.work, rank, error)
                raise


@contextmanager
def only_run(work: Path) -> Iterator[None]:
    """Keep other runs out of the folder; DataError if one is in it."""
    problem = f"{work.parent}: another run is preparing documents here; wait until it has ended or stop it."
    with _locked(work / "run.lock", fcntl.LOCK_EX, seconds=0, problem=problem):
        yield


def wait_for_orphans(work: Path) -> None:
    """Return when no task of a killed run is at work any more."""
    problem = f"{work.parent}: tasks of an earlier run are still at work here; wait until they have ended or stop them."
    with _locked(work / "tasks.lock", fcntl.LOCK_EX, seconds=ORPHAN_SECONDS, problem=problem):
        pass


def num_completed(work: Path) -> int:
    try:
        return sum(1 for _ in (work / _COMPLETIONS).iterdir())
    except FileNotFoundError:
        return 0


def write_error(work: Path, rank: int, error: Exception) -> None:
    """Leave the sentence for the caller, and for a bug also the traceback."""
    text = str(error)
    if not isinstance(error, UnspoolError):
        log = work / "logs" / f"task_{rank:05d}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("a") as file:
            file.write("".join(traceback.format_exception(error)))
        text = f"task {rank} failed with {type(error).__name__}: {error}; the traceback is in {log}."
    aside = work / f"error-{rank:05d}.tmp"
    aside.write_text(text)
    aside.replace(_error_path(work, rank))


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
    """Hold a lock on a file, which ends with the process however it ends; DataError(problem) after `seconds`."""
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
                pass  # some network file systems know no locks
            break
        yield


# Tasks in processes of this machine.


class LocalTasks(Tasks, LocalPipelineExecutor):  # type: ignore[misc]
    """In place of datatrove's pool, which loads all steps again for every task and hangs when a process dies."""

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
    """A process that runs one task after another, seen from the one that started it."""

    def __init__(self, tasks: LocalTasks) -> None:
        context = multiprocess.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(tasks, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that reading ends when the process does
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
        cause = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise DataError(
            f"the worker process of task {self.rank} {cause}; "
            "if the machine ran out of memory, set fewer engine.workers."
        ) from None


def _serve(tasks: LocalTasks, pipe: Connection) -> None:
    """The life of a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        rank = pipe.recv()
        try:
            tasks._run_for_rank(rank)
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _end_with_parent() -> None:
    multiprocess.parent_process().join()
    os._exit(1)


def _start_server(steps: Sequence[PipelineStep]) -> None:
    """Worker processes are forked from a server that has imported what they need; it ends with this process."""
    modules: set[Any] = {type(step).__module__ for step in steps}
    multiprocess.set_forkserver_preload(["__main__", __name__, *sorted(modules - {"__main__"})])
    # Ctrl-C reaches all processes of a terminal, but only this one should answer: the others inherit
    # that they do not hear it. The tracker comes first, since starting it would let the signal in again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
