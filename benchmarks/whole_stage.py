"""Time one whole stage of the 135M shape at 32K through `unspool train`, by phase.

    python benchmarks/whole_stage.py [--tokens 10M] [--out FILE | --save]

The first command trains two steps and fills the compile cache, as an earlier stage of the run would. The second
trains `--tokens` tokens with a checkpoint every eight steps. Start-up is everything up to the first step that compiles
nothing: imports, checks, packed rows, weights, first step. Weights are random (SmolLM2's shape). `--small` is a
tiny model on a CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gate_parts import UNSPOOL, Gate, make_model, read_metrics, unspool
from gpu import machine, require_gpu

from unspool.core.sizes import parse_size

RESULTS = Path(__file__).parent / "results" / "whole_stage.json"
CASE = "135m-32k"
GOAL = 15.0  # seconds of start-up and export


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_size, default=10 << 20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    if not args.small:
        require_gpu()
    with tempfile.TemporaryDirectory(prefix="whole-stage-") as folder:
        gate = Gate(Path(folder), small=args.small)
        make_model(gate, CASE)
        case = gate.case(CASE)
        steps = 4 if args.small else max(2, args.tokens // case.tokens)
        runs = [run(gate, count) for count in (2, steps)]
    for found in runs:
        print(describe(found), flush=True)
    if args.save or args.out != RESULTS:
        about = {} if args.small else machine()
        args.out.write_text(json.dumps({"machine": about, "goal_seconds": GOAL, "runs": runs}, indent=1) + "\n")


def run(gate: Gate, steps: int) -> dict[str, Any]:
    """Run `unspool pack`, then `unspool train`; keep the packed rows and the compile cache."""
    case = gate.case(CASE)
    recipe = gate.write_recipe(case, "whole", model="135m", steps=steps, checkpoint_every=case.checkpoint_every)
    unspool("pack", recipe)
    began = time.monotonic()
    done = subprocess.run([*UNSPOOL, "train", str(recipe)], stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - began
    sys.stderr.write(done.stderr)
    done.check_returncode()
    metrics = read_metrics(gate.stage("whole"))
    facts = json.loads((gate.work / "runs" / "whole" / "run.json").read_text())
    return {
        "steps": len(metrics),
        "tokens": len(metrics) * case.tokens,
        "seconds": round(seconds, 1),
        "outside_steps": round(seconds - sum(step["seconds"] for step in metrics[1:]), 1),
        "first_step_seconds": metrics[0]["seconds"],
        "tokens_per_second": round((len(metrics) - 1) * case.tokens / sum(step["seconds"] for step in metrics[1:])),
        "phases": facts["phases"]["stages/stage"],
        "printed": [line for line in done.stderr.splitlines() if "finished in" in line],
    }


def describe(found: dict[str, Any]) -> str:
    return (
        f"{found['steps']} steps, {found['tokens']:,} tokens in {found['seconds']} s, {found['outside_steps']} s "
        f"of them outside the steps after the first, which took {found['first_step_seconds']:.1f} s; "
        f"{found['tokens_per_second']:,} tokens/s"
    )


if __name__ == "__main__":
    main()
