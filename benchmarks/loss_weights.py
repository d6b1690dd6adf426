"""Step time with loss weights: plain loss, EXACT and LongCE in turn, on the same model and rows.

    python benchmarks/loss_weights.py [--rounds 5] [--out FILE | --save]

The 135M shape at 32K, four rows of one document per step, and the product's step (`train_step`). Each round measures
every kind of loss, in the opposite order of the round before. A step begins when its batches are built; building them,
which the product does in a thread during the step before, is timed apart. `--small` is a tiny model on a CPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from gpu import machine, require_gpu
from train_columns import open_stage, synchronized_time

from unspool.training.config import StageConfig
from unspool.training.loader import StepBatches, build_step, pinned, step_picks
from unspool.training.step import train_step

RESULTS = Path(__file__).parent / "results" / "loss_weights.json"
CASE = "135m-32k"
KINDS = ("uniform", "exact", "longce")
WARMUP = 2  # steps of each kind, in which kernels are compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--small", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    case = CASES[CASE]
    if args.small:
        case = case.as_small()
    else:
        require_gpu()
    with tempfile.TemporaryDirectory(prefix="loss-weights-") as folder:
        build, step = open_case(case, Path(folder))
        lines = measure(build, step, rounds=args.rounds, tokens=case.tokens)
    for line in lines:
        print(describe(line), flush=True)
    if args.save or args.out != RESULTS:
        about = {} if args.small else machine()
        facts = {"machine": about, "case": CASE, "tokens": case.tokens, "rounds": args.rounds}
        args.out.write_text(json.dumps(facts | {"kinds": lines}, indent=1) + "\n")


def open_case(case: Case, folder: Path) -> tuple[Callable[[str, int], StepBatches], Callable[[StepBatches], float]]:
    """Load the case; return a function that builds the batches of a kind and step, and one that trains a step."""
    stage = open_stage(case, folder)
    plain = stage.config
    stages = {kind: StageConfig.model_validate(plain.model_dump() | {"loss": {"weights": kind}}) for kind in KINDS}
    weights = {kind: one.loss.build(one, one.loss.measure(one, stage.rows)) for kind, one in stages.items()}

    def build(kind: str, number: int) -> StepBatches:
        batches = build_step(stages[kind], stage.rows, step_picks(plain, stage.mix, number), loss_weights=weights[kind])
        return batches if case.small else pinned(batches)

    return build, lambda batches: train_step(stage.model, stage.updater, batches, lr=plain.lr).loss


def measure(
    build: Callable[[str, int], StepBatches], step: Callable[[StepBatches], float], *, rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """Return a line per kind: seconds of each step and of building its batches, and the ratio to plain loss."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    building: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peak: dict[str, float] = {}
    for number in range(1, WARMUP + rounds + 1):
        for kind in order(number):
            began = time.perf_counter()
            batches = build(kind, number)
            built = time.perf_counter() - began
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            began = synchronized_time()
            step(batches)
            took = synchronized_time() - began
            if number > WARMUP:
                seconds[kind].append(took)
                building[kind].append(built)
                peak[kind] = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    plain = statistics.median(seconds[KINDS[0]])
    return [
        {
            "loss": kind,
            "seconds": statistics.median(seconds[kind]),
            "ratio": statistics.median(seconds[kind]) / plain,
            "tokens_per_second": tokens / statistics.median(seconds[kind]),
            "build_seconds": statistics.median(building[kind]),
            "peak_gib": round(peak[kind], 2) or None,
            "step_seconds": [round(one, 4) for one in seconds[kind]],
        }
        for kind in KINDS
    ]


def order(number: int) -> tuple[str, ...]:
    """Return the kinds in the order of a round."""
    return KINDS if number % 2 else KINDS[::-1]


def describe(line: dict[str, Any]) -> str:
    memory = f", {line['peak_gib']} GiB" if line["peak_gib"] else ""
    return (
        f"{line['loss']:<8} {line['seconds']:8.4f} s per step, {line['tokens_per_second']:9,.0f} tokens/s, "
        f"{line['ratio']:.3f} of plain loss; batches built in {line['build_seconds']:.4f} s{memory}"
    )


if __name__ == "__main__":
    main()
