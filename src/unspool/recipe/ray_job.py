"""Ranks on a Ray cluster: `python -m unspool.recipe.ray_job --workers 16 … -- -m unspool.cli.main run …`.

Each rank is a process next to a Ray actor, which holds its GPU and forwards its output. Ranks of one node have
consecutive numbers, so that ranks that share a sequence are on one node. If a rank fails, all ranks restart and resume
from the last checkpoint. All nodes need the same folder and Python environment. Ray Train is not used, because its
workers create their own process groups and it depends on pandas.
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

# Seconds to wait for resources; scaling up a cluster takes minutes.
RESOURCE_TIMEOUT = 1800.0


class Rank:
    """Run the process of one rank on the node and GPU that Ray assigned."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def where(self) -> tuple[str, str, int]:
        """Return the node id, its address and a free port."""
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
    """Return worker and environment of ranks 0, 1, …. Each process sees only its own GPU, as device 0."""
    order = sorted(range(len(places)), key=lambda worker: (places[worker][0], worker))
    _, address, port = places[order[0]]
    rendezvous = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(places))}
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [(worker, env | rendezvous | own | {"RANK": str(rank)}) for rank, worker in enumerate(order)]


def run_once(args: argparse.Namespace) -> list[int]:
    """Run all ranks once; return their exit codes by rank."""
    needs = {"CPU": 1, "GPU": 1} if args.gpu else {"CPU": 1}
    group = placement_group([needs] * args.workers, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=RESOURCE_TIMEOUT):
            sys.exit(
                f"error: the cluster has no resources for {args.workers} ranks with {needs} each; use fewer ranks, "
                "or add nodes."
            )
        build: Any = ray.remote(num_cpus=1, num_gpus=1 if args.gpu else 0, max_concurrency=2)(Rank)
        workers = [
            build.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote()
            for number in range(args.workers)
        ]
        places = ray.get([worker.where.remote() for worker in workers])
        assigned = environments(places, dict(text.split("=", 1) for text in args.env))
        runs = [workers[worker].run.remote(args.command, env, args.folder) for worker, env in assigned]
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
    parser.add_argument("command", nargs="+", help="arguments of python on each rank, after --")
    return parser.parse_args(words)


def main() -> None:
    args = parse(sys.argv[1:])
    ray.init(logging_level="warning")
    for attempt in range(args.restarts + 1):
        codes = run_once(args)
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if not failed:
            return
        print(f"attempt {attempt + 1} of {args.restarts + 1} failed; exit codes by rank: {failed}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
