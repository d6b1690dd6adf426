"""What `unspool plan` predicts for 8, 64 and 512 H200: `python benchmarks/projection.py [--save]`, a minute on a CPU.

8B at 64K to 512K and 70B at 64K, in the layouts and with the memory settings that `plan` chooses for steps of 4M
tokens. Nothing is measured here: rates were fitted to steps of one H200, and links are assumed. docs/results/cost.md
shows the table; simulated_ranks.py measures compute and memory of single ranks.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simulated_cases import GPUS, SIMULATIONS, plan_of

from unspool.planning.projection import assumptions, project

RESULTS = Path(__file__).parent / "results" / "projection.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write another file")
    args = parser.parse_args()
    found = projected([name for name, simulation in SIMULATIONS.items() if simulation.world == GPUS[0]])
    for one in found["points"]:
        print(
            f"{one['model']} {one['context_length'] >> 10}K on {one['gpus']}: {one['tokens_per_second']:,.0f} tokens/s "
            f"per GPU, MFU {one['mfu']:.0%}, {one['peak_gib']:.1f} GiB"
        )
    if args.save or args.out != RESULTS:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def projected(names: list[str]) -> dict[str, Any]:
    """Project the recipe of each case to all numbers of GPUs."""
    points, assumed = [], []
    for name in sorted(names, key=lambda one: (SIMULATIONS[one].shape["num_hidden_layers"], SIMULATIONS[one].length)):
        with tempfile.TemporaryDirectory(prefix="projection-") as folder:
            plan = plan_of(SIMULATIONS[name], Path(folder))
            assumed = assumptions(plan)
            points += [{"model": name.split("-")[0].upper(), **asdict(one)} for one in project(plan, GPUS)]
    # The same for all points: every one is of several GPUs of one kind.
    [origins, *_] = [point.pop("origins") for point in points]
    return {
        "gpu": plan.machine.gpu.title,
        "assumptions": assumed,
        "origins": origins,
        "points": [rounded(point) for point in points],
    }


def rounded(point: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in point.items()}


if __name__ == "__main__":
    main()
