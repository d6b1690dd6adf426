"""Ranks on a Ray cluster: `python -m unspool.recipe.ray_job --workers 16 … -- -m unspool.cli.main run …`.

In: how many ranks, what each runs. Out: exit code 0 if all of them ended so.
Each rank is a process of its own beside a Ray actor, which holds its GPU and passes on what it says; ranks of one
machine are neighbours, so that those that share a row exchange inside of it. When one fails, all are stopped and
started again, which goes on from the last checkpoint.
Why not by Ray Train: its workers start process groups of their own, and it brings pandas and more along; ranks need
none of that, only a place each and an address to meet at.
Price: all machines must see the same folder and have the same Python environment.
"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Until all ranks have their place; a cluster that grows takes minutes.
PLACES = 1800.0


class Rank:
    """Runs one rank's process, on the machine and with the GPU that Ray has given."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str, int]:
        """The node, its address and a free port of it."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = int(free.getsockname()[1])
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(self, command: Sequence[str], env: dict[str, str], folder: str) -> int:
        self._child = subprocess.Popen([sys.executable, *command], env=os.environ | env, cwd=folder)
        return self._child.wait()

    def stop(self) -> None:
        if self._child is not None:
            self._child.terminate()


def environments(places: Sequence[tuple[str, str, int]], env: dict[str, str]) -> list[tuple[int, dict[str, str]]]:
    """Which worker is rank 0, 1, …, and what its process is told. Each sees its own GPU only, as number 0."""
    order = sorted(range(len(places)), key=lambda worker: (places[worker][0], worker))
    _, address, port = places[order[0]]
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(places))}
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [(worker, env | meeting | own | {"RANK": str(rank)}) for rank, worker in enumerate(order)]


def run_once(asked: argparse.Namespace) -> list[int]:
    """The exit codes of all ranks, by rank."""
    needs = {"CPU": 1, "GPU": 1} if asked.gpu else {"CPU": 1}
    group = placement_group([needs] * asked.workers, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=PLACES):
            sys.exit(f"error: the cluster has no room for {asked.workers} ranks with {needs} each.")
        build: Any = ray.remote(num_cpus=1, num_gpus=1 if asked.gpu else 0, max_concurrency=2)(Rank)
        workers = [
            build.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote()
            for number in range(asked.workers)
        ]
        places = ray.get([worker.where.remote() for worker in workers])
        told = environments(places, dict(text.split("=", 1) for text in asked.env))
        runs = [workers[worker].run.remote(asked.command, env, asked.folder) for worker, env in told]
        waiting = list(runs)
        while waiting:
            (ended,), waiting = ray.wait(waiting, num_returns=1)
            if ray.get(ended) != 0:
                ray.get([worker.stop.remote() for worker in workers])
                break
        return list(ray.get(runs))
    finally:
        remove_placement_group(group)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="unspool.recipe.ray_job")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("command", nargs="+", help="what each rank gives to python, after --")
    return parser.parse_args(words)


def main() -> None:
    asked = parse(sys.argv[1:])
    ray.init(logging_level="warning")
    for attempt in range(asked.restarts + 1):
        codes = run_once(asked)
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if not failed:
            return
        print(f"try {attempt + 1} of {asked.restarts + 1} ended; exit codes by rank: {failed}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
