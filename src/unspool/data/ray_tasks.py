"""Tasks on a Ray cluster, or on one started on this machine for the purpose.

Promise: a worker process of Ray's loads the steps once; a task whose process or machine was lost is
tried again; a cluster started here is gone afterwards, with its files.
Price: starting Ray takes some seconds. All machines must see the same file system.
A cluster started here listens on every network interface, which Ray cannot be told to change, and runs
whatever it is sent: it therefore gets a password of its own that only its processes know.
"""

import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from tempfile import TemporaryDirectory
from typing import Any

import dill  # type: ignore[import-untyped]
from datatrove.executor.ray import RayPipelineExecutor

from unspool.base.errors import ConfigError
from unspool.data.tasks import Tasks

# It only holds the steps, tokenizer included.
_OBJECT_STORE_BYTES = 512 << 20


class RayTasks(Tasks, RayPipelineExecutor):  # type: ignore[misc]
    """In place of datatrove's loop, which starts a process for every task and needs all tasks to have run."""

    address: str | None = None

    def run(self) -> None:
        import ray

        with connected(self.address, self.workers):
            waiting = deque(self.get_incomplete_ranks())
            steps = ray.put(dill.dumps(self))
            # No claim on memory: Ray would only book it, not limit it, and refuse small machines.
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
    # In a list, since Ray would hand over anything else by value, once per task.
    _load(steps[0])._run_for_rank(rank)


@lru_cache(maxsize=1)
def _load(steps: Any) -> RayTasks:
    import ray

    tasks: RayTasks = dill.loads(ray.get(steps))
    os.chdir(tasks.cwd)  # for the user's relative paths
    return tasks


@cache
def _password() -> str:
    # One per process, since Ray reads it once.
    return secrets.token_hex(32)


def _try(address: str) -> None:
    """OSError if nobody listens there, which Ray itself would find out in a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextmanager
def connected(address: str | None, workers: int) -> Iterator[None]:
    """Ray, quietly; shut down afterwards if it was not running before."""
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    if address is not None:
        try:
            _try(address)
            ray.init(address=address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"engine.address={address}: no Ray cluster answers there ({error}).") from None
        try:
            yield
        finally:
            ray.shutdown()
        return
    os.environ.setdefault("RAY_AUTH_TOKEN", _password())
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Its sockets need a short path, which the user's own temporary folder may not have.
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
