"""Slowdown of the demo next to busy processes.

    python benchmarks/neighbor.py [--busy 0 1 2] [--times 3] [--recipe tiny] [--stage abf] [--variant NAME=VALUE ...]
        [--save | --out FILE]
    python benchmarks/neighbor.py --add FILE ... --save   combine the results of several calls

On two cores (`taskset -c 0,1` on a larger machine), fair shares would give 1.5 times the idle time next to one busy
process, and 2.0 next to two. Torch's threads wait for each other at every operator; a thread that spins while it waits
takes CPU time from the thread that works. `unspool` lets them sleep (`src/unspool/core/process_environment.py`).
Rounds alternate between the numbers of busy processes. Each run has its own folder. `--stage NAME` trains only that
stage, after tokenizing and packing once. `--variant` runs with additional environment variables, such as
`spin=GOMP_SPINCOUNT=300000`. Busy processes compute in Python, belong to the same session as the demo (Linux shares
cores between sessions first), and stop with it. The output includes CPU time of other processes on the same cores:
results are valid only if it is near 0.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "neighbor.json"
GOALS = {0: 1.0, 1: 1.7, 2: 2.2}  # times the idle time
BUSY = "while True: pass"
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy processes")
    parser.add_argument("--times", type=int, default=3, help="runs of each")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--stage", help="train only this stage")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=VARIABLE=VALUE", help="an environment")
    parser.add_argument("--folder", type=Path, help="where runs are written; default: a temporary one")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another file to write")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="what --out wrote; run nothing")
    args = parser.parse_args()
    variants = {"default": {}} | dict(map(parse_variant, args.variant))
    if args.add:
        found = [json.loads(path.read_text()) for path in args.add]
        write(args.out, found[0], [run for one in found for run in one["runs"]])
        return
    runs: list[dict[str, Any]] = []
    about = {"cores": len(os.sched_getaffinity(0)), "recipe": args.recipe, "stage": args.stage}
    with tempfile.TemporaryDirectory(prefix="neighbor-", dir=args.folder) as folder:
        prepared = prepare(args, Path(folder)) if args.stage else None
        for number in range(args.times):
            # Reverse every other round, so that no case is always first.
            cases = [(busy, name) for busy in args.busy for name in variants]
            for busy, name in cases if number % 2 == 0 else cases[::-1]:
                runs.append(measure(args, Path(folder), prepared, busy, name, variants[name]))
                print(describe(runs[-1]), flush=True)
                if args.save or args.out != RESULTS:
                    write(args.out, about, runs)
    for line in summarize(runs):
        print(json.dumps(line))


def write(path: Path, about: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(about | {"summary": summarize(runs), "runs": runs}, indent=1) + "\n")


def parse_variant(text: str) -> tuple[str, dict[str, str]]:
    name, variable, value = text.split("=", 2)
    return name, {variable: value}


def command(args: argparse.Namespace, verb: str, out: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "unspool.cli.main", "--quiet", verb, args.recipe, "--set", f"out={out}", *more]
    return words + [word for one in args.set for word in ("--set", one)]


def prepare(args: argparse.Namespace, folder: Path) -> Path:
    """Tokenize and pack once, for runs of a single stage."""
    subprocess.run(command(args, "pack", folder / "packed"), check=True, stdout=subprocess.DEVNULL)
    return folder / "packed"


def measure(
    args: argparse.Namespace, folder: Path, prepared: Path | None, busy: int, name: str, variables: dict[str, str]
) -> dict[str, Any]:
    out = folder / "run"
    if prepared is None:
        words = command(args, "run", out)
    else:
        shutil.copytree(prepared, out)
        words = command(args, "train", out, "--stage", args.stage)
    with ExitStack() as stack:
        neighbors = [stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY])) for _ in range(busy)]
        for neighbor in neighbors:
            stack.callback(neighbor.kill)
        used, taken, began = resource.getrusage(resource.RUSAGE_CHILDREN), machine_seconds(), time.monotonic()
        done = subprocess.run(words, env=os.environ | variables, stdout=subprocess.DEVNULL, check=False)
        seconds, own = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = own.ru_utime + own.ru_stime - used.ru_utime - used.ru_stime
        of_neighbors = sum(process_seconds(neighbor.pid) for neighbor in neighbors)
        others = machine_seconds() - taken - cpu - of_neighbors
    shutil.rmtree(out)
    if done.returncode:
        sys.exit(f"`{' '.join(words)}` ended with code {done.returncode}")
    return {
        "busy": busy,
        "variant": name,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "waits": own.ru_nvcsw - used.ru_nvcsw,
        "preempted": own.ru_nivcsw - used.ru_nivcsw,
        "others_cores": round(max(0.0, others) / seconds, 2),
    }


def machine_seconds() -> float:
    """Busy seconds so far of the cores that this process may use."""
    own = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    total = 0
    for name, *ticks in map(str.split, Path("/proc/stat").read_text().splitlines()):
        if name in own:
            user, nice, system, _, _, *rest = map(int, ticks[:8])
            total += user + nice + system + sum(rest[:2])
    return total / TICKS


def process_seconds(pid: int) -> float:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICKS


def describe(run: dict[str, Any]) -> str:
    return (
        f"{run['busy']} busy, {run['variant']}: {run['seconds']} s, {run['cpu_seconds']} s of cores, "
        f"{run['waits']} waits, {run['preempted']} times preempted; others took {run['others_cores']} cores"
    )


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median of each case, and its ratio to the idle time of the same variant."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        seconds.setdefault((run["variant"], run["busy"]), []).append(run["seconds"])
    found = []
    for (variant, busy), each in sorted(seconds.items()):
        idle = seconds.get((variant, 0))
        ratio = round(statistics.median(each) / statistics.median(idle), 2) if idle else None
        goal = GOALS.get(busy)
        reached = None if ratio is None or goal is None else ratio <= goal
        line = {"variant": variant, "busy": busy, "median_seconds": statistics.median(each), "seconds": each}
        found.append(line | {"times_idle": ratio, "goal": goal, "reached": reached})
    return found


if __name__ == "__main__":
    main()
