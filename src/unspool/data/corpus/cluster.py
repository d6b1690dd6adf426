"""Run tasks as a job array of a Slurm cluster, or on a Ray cluster.

A Slurm job outlives this process: after a kill, the next run finds the job and waits for it. Ctrl-C or a failed task
cancels the job. All machines must see the same file system under the same paths.
"""

import logging
import math
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dill  # type: ignore[import-untyped]
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor

from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus.executors import Tasks, first_error

# Seconds between two requests to the scheduler, which serves a whole cluster.
POLL_SECONDS = 5.0
# A network file system shows other machines' files with a delay, so a job must be absent in several polls.
GONE_POLLS = 4
# Most clusters allow arrays of 1001 entries. With more tasks, several tasks share an entry.
MAX_ARRAY = 1000


class SlurmTasks(Tasks, SlurmPipelineExecutor):  # type: ignore[misc]
    """datatrove's executor, which only submits jobs, extended to wait until they end."""

    def run(self) -> None:
        if "SLURM_ARRAY_TASK_ID" in os.environ:
            super().run()  # this process is part of the job
            return
        ranks = self.get_incomplete_ranks()
        if any(character.isspace() for character in str(self.work)):
            raise ConfigError(f"{self.work}: Slurm jobs need a path without spaces; use another folder.")
        self.tasks_per_job = math.ceil(len(ranks) / MAX_ARRAY)
        try:
            self.launch_job()
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                f"sbatch rejected the job (exit code {error.returncode}, see its message above); check "
                "engine.partition, engine.time and engine.sbatch, or submit "
                f"{self.work / 'launch_script.slurm'} by hand."
            ) from None
        self._job_path.write_text(str(self.job_id))
        self._wait(str(self.job_id))

    def wait_for_earlier(self) -> None:
        if self._job_path.exists():
            job = self._job_path.read_text()
            if _is_queued(job):
                self._wait(job, must_finish=False)

    def launch_merge_stats(self) -> None:
        """Do nothing: the counts are in the manifest."""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        options: dict[str, Any] = super().get_sbatch_args(max_array)
        del options["mem-per-cpu"]  # replaced by `mem`, which is per task
        return options

    @property
    def _job_path(self) -> Path:
        return self.work / "slurm_job"

    def _wait(self, job: str, must_finish: bool = True) -> None:
        gone = 0
        try:
            while missing := self.get_incomplete_ranks():
                if error := first_error(self.work):
                    raise DataError(error)
                if gone >= GONE_POLLS:
                    break
                gone = 0 if _is_queued(job) else gone + 1
                time.sleep(POLL_SECONDS)
        except BaseException:
            subprocess.run(["scancel", job], check=False, capture_output=True)
            raise
        if missing and must_finish:
            raise DataError(
                f"Slurm job {job} ended without task {missing[0]}{_and_others(len(missing) - 1)}: out of time "
                f"(engine.time), out of memory (engine.memory_gb) or canceled; the logs are in {self.work}/slurm_logs."
            )


def activation() -> str:
    """Return the shell command that activates this process's Python in a job."""
    bin_dir = Path(sys.executable).parent
    if (bin_dir / "activate").exists():
        return f"source {shlex.quote(str(bin_dir / 'activate'))}"
    return f"export PATH={shlex.quote(str(bin_dir))}:$PATH"


def _is_queued(job: str) -> bool:
    """Return whether any part of the job is pending or running; True, to poll again, if the scheduler is silent."""
    asked = subprocess.run(["squeue", "-h", "-j", job], check=False, capture_output=True, text=True)
    if asked.returncode:
        # The scheduler forgets jobs a few minutes after they end.
        return "invalid job id" not in asked.stderr.lower()
    return bool(asked.stdout.strip())


def _and_others(count: int) -> str:
    return f" and {count} others" if count > 1 else " and one other" if count else ""


# Ray, either an existing cluster or one that is started on this machine


_OBJECT_STORE_BYTES = 512 << 20  # holds only the steps, including the tokenizer


class RayTasks(Tasks, RayPipelineExecutor):  # type: ignore[misc]
    """Replace datatrove's loop, which starts a process for every task and cannot run a subset of the tasks."""

    address: str | None = None

    def run(self) -> None:
        import ray

        with connected(self.address, self.workers):
            waiting = deque(self.get_incomplete_ranks())
            steps = ray.put(dill.dumps(self))
            # No memory request: Ray would only reserve memory, not limit it, and would reject small machines.
            task = ray.remote(num_cpus=1)(_run_task)
            running: list[Any] = []
            try:
                while waiting or running:
                    while waiting and len(running) < self.workers:
                        running.append(task.remote([steps], waiting.popleft()))
                    done, running = ray.wait(running, num_returns=1)
                    ray.get(done)
            finally:
                for left in running:
                    ray.cancel(left, force=True)


def _run_task(steps: list[Any], rank: int) -> None:
    # In a list, because Ray would otherwise pass the object by value, once per task.
    _load(steps[0])._run_for_rank(rank)


@lru_cache(maxsize=1)
def _load(steps: Any) -> RayTasks:
    import ray

    tasks: RayTasks = dill.loads(ray.get(steps))
    os.chdir(tasks.cwd)  # for the user's relative paths
    return tasks


@cache
def _password() -> str:
    # One per process, because Ray reads it only once.
    return secrets.token_hex(32)


def _check_listening(address: str) -> None:
    """Raise OSError if nothing listens there; Ray would notice only after 15 minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextmanager
def connected(address: str | None, workers: int) -> Iterator[None]:
    """Connect to Ray without its logs; shut it down afterwards unless it was running before."""
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address is not None:
        try:
            _check_listening(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"engine.address={address}: no Ray cluster answers at this address ({error}); start one, or omit "
                "engine.address."
            ) from None
        try:
            yield
        finally:
            ray.shutdown()
        return
    os.environ.setdefault("RAY_AUTH_TOKEN", _password())
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's sockets need a short path; the user's temporary folder may have a long one.
    with TemporaryDirectory(prefix="unspool-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                address="local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=folder,
                **quiet,
            )
            yield
        finally:
            ray.shutdown()
