"""One rank of 8, 64 and 512 GPUs on one GPU, beside what `unspool plan` predicts.

    python benchmarks/simulated_ranks.py --budget 500 --out FILE [--cases 8b-64k-8 …] [--steps 1] [--link 360]
        [--network 40]
    python benchmarks/simulated_ranks.py --expect   print layouts and expected seconds per case; run nothing
    python benchmarks/simulated_ranks.py --small    tiny shapes on the CPU, to test the benchmark itself

The process is rank 0 of a fake process group (collectives.py). It builds the stage with the functions of `unspool
train`: FSDP2, Ulysses and ring in the layout and with the memory settings that `plan` chooses for a step of 4M tokens.
A simulated step has one micro-batch per rank, and so has the prediction beside it.

- Memory is the allocator's peak in a step. NCCL's own buffers are not in it.
- Compute is the time of a step on the device. Nobody waits for other ranks, and collectives only copy locally.
- Bytes that the rank sends are counted per collective.
- A step is the measured compute plus the time that counted bytes need over the stated bandwidths beyond what overlaps,
  by the rule of `plan`. No bandwidth is measured.

Each case runs in its own process, and FILE is written after each. A case that the rest of the budget cannot hold is
skipped. Goal: memory within 10%.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import in_own_process
from simulated_cases import LONG, SIMULATIONS, Prediction, compare, predict

RESULTS = Path(__file__).parent / "results" / "simulated_ranks.json"
MEMORY_GOAL = 0.10
NO_GPU = 2
# Seconds of a case outside of its steps: imports, weights and rows; compiling. Steps may take longer than predicted.
START, COMPILE, SLOWER = 25, 20, 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = [name for name in SIMULATIONS if name not in LONG]
    parser.add_argument("--cases", nargs="+", choices=SIMULATIONS, default=usual, help=f"default: all but {LONG}")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after this time")
    parser.add_argument("--steps", type=int, default=1, help="measured steps, after one that compiles")
    parser.add_argument("--link", type=float, metavar="GB/S", help="bandwidth inside a machine; default: that of plan")
    parser.add_argument("--network", type=float, metavar="GB/S", help="bandwidth between machines")
    parser.add_argument("--out", type=Path, help=f"write results here ({RESULTS.name}); cases not run keep theirs")
    parser.add_argument("--expect", action="store_true", help="print layouts and expected seconds; run nothing")
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny shapes on the CPU in fp32, to test the benchmark itself; bytes are not those of the plan",
    )
    args = parser.parse_args()
    deadline = time.monotonic() + args.budget
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="simulated-") as folder:
        for name in args.cases:
            results[name] = run(name, Path(folder) / name, deadline, args)
            if args.out is not None:
                write(args.out, results)
    print(table(results))


def run(name: str, folder: Path, deadline: float, args: argparse.Namespace) -> dict[str, Any]:
    """Plan a case, simulate one of its ranks, and compare both."""
    prediction = predict(SIMULATIONS[name], folder, small=args.small, link=args.link, network=args.network)
    expected = 5.0 if args.small else expected_seconds(prediction, args.steps)
    found = prediction.as_plain() | {"expected_seconds": round(expected)}
    if args.expect:
        return found
    left = deadline - time.monotonic()
    if expected > left:
        print(f"{name}: not run, it takes about {expected:.0f} s and {max(0.0, left):.0f} s are left", flush=True)
        return found | {"error": "not run, budget spent"}
    print(f"{name}: about {expected:.0f} s", flush=True)
    began = time.monotonic()
    rank = simulate(prediction, args, None if left == float("inf") else left)
    found["seconds"] = round(time.monotonic() - began, 1)
    if isinstance(rank, int):
        if rank == NO_GPU:
            sys.exit(NO_GPU)
        print(f"{name}: ended with code {rank} after {found['seconds']:.0f} s", flush=True)
        return found | {"error": f"ended with code {rank}"}
    found |= {"rank": rank, "measured": compare(prediction, rank)}
    print(line(name, found), flush=True)
    return found


def simulate(prediction: Prediction, args: argparse.Namespace, seconds: float | None) -> dict[str, Any] | int:
    script, world = str(Path(__file__).with_name("simulated_rank.py")), str(prediction.simulation.world)
    options = ["--steps", str(args.steps), *(["--small"] if args.small else [])]
    return in_own_process(script, str(prediction.recipe), world, *options, seconds=seconds)


def expected_seconds(prediction: Prediction, steps: int) -> float:
    """Seconds of a case: its first step compiles, and may take longer than a measured one."""
    compiling = COMPILE if prediction.estimate.stage.compile else 0
    return START + compiling + SLOWER * (steps + 1) * prediction.compute_seconds


def write(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write results; a case that failed or was not run does not replace a measured one."""
    known = json.loads(path.read_text())["cases"] if path.is_file() else {}
    fresh = {name: found for name, found in results.items() if "measured" in found or name not in known}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"goals": {"memory": MEMORY_GOAL}, "cases": known | fresh}
    path.write_text(json.dumps(content, indent=1) + "\n")


# Output


def layout_text(found: dict[str, Any]) -> str:
    sizes = [f"{axis} {size}" for axis, size in found["layout"].items() if size > 1]
    return ", ".join(sizes)


def table(results: dict[str, dict[str, Any]]) -> str:
    head = (
        "case",
        "layout",
        "memory, GiB: plan, measured",
        "compute, s: plan, measured",
        "sent, GB: plan, counted",
        "step, s: plan, from measured compute",
        "tokens/s per GPU",
        "s",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(name, found))} |" for name, found in results.items())])


def _cells(name: str, found: dict[str, Any]) -> list[str]:
    planned, measured, rank = found["plan"], found.get("measured"), found.get("rank", {})
    memory, sent = rank.get("memory_gib"), sum(planned["sent_bytes"].values())
    counted = None if measured is None else sum(measured["counted_bytes"].values())
    seconds = found.get("seconds", f"about {found['expected_seconds']}")
    return [
        name,
        layout_text(found),
        f"{planned['peak_gib']:.1f}, {_shown(memory, 1)}",
        f"{planned['compute_seconds']:.2f}, {_shown(measured and measured['compute_seconds'], 2)}",
        f"{sent / 1e9:.2f}, {_shown(counted and counted / 1e9, 2)}",
        f"{planned['step_seconds']:.2f}, {_shown(measured and measured['step_seconds'], 2)}",
        _shown(measured and measured["tokens_per_second_per_gpu"], 0),
        f"{seconds}",
    ]


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def line(name: str, found: dict[str, Any]) -> str:
    measured, ratios = found["measured"], found["measured"]["predicted_to_measured"]
    shown = ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items())
    goal = "" if abs(ratios.get("memory", 1.0) - 1) <= MEMORY_GOAL else "; memory MISSES the goal of 10%"
    own = "" if found["rank"]["updated"] else "; weights were not updated (loss or gradient not finite)"
    return (
        f"{name}: {measured['compute_seconds']:.2f} s of computing, {measured['tokens_per_second_per_gpu']:,.0f} "
        f"tokens/s per GPU; predicted ÷ measured: {shown}{goal}{own}; in all {found['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
