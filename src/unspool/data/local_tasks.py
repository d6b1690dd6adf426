"""Tasks in processes of this machine.

Promise: each process loads the steps once; a process that dies is an error, not a wait without
end; whatever becomes of this process, however it is killed, its workers end with it.
Price: the first of several workers takes as long to start as the steps' modules take to import.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import multiprocess  # type: ignore[import-untyped]
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from multiprocess import forkserver, resource_tracker
from multiprocess.connection import Connection, wait  # type: ignore[import-untyped]

from unspool.base.errors import DataError
from unspool.data.tasks import Tasks


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
