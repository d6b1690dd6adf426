"""Planner against measurement: peak memory and time of a step, on one GPU.

    python benchmarks/plan.py [--cases 8b-8k 8b-64k 8b-128k 135m-32k] [--again] [--calibrate] [--save]

Uses the results of `benchmarks/train.py --save`. Missing cases, and all cases with --again, run a warm-up step and one
or two measured steps with the same code, each in its own process: about 15 seconds for 8K, 45 for 64K, 100 for 128K and
15 for the small model. --calibrate also measures the few layers that `unspool plan --measure` would, and prints the
prediction from them. Without a GPU only existing results are compared.
The goal: memory within 10%, time within 15%.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from cases import PLANNED as SHORT
from gpu import RESULTS, machine, require_gpu, save
from processes import in_own_process

from unspool.planning.calibration import measure
from unspool.planning.cost import REFERENCE, Gpu, Shape, match_gpu
from unspool.planning.footprint import GIB, PARTS, StepSetup, footprint
from unspool.planning.step_time import device_speed, documents, step_seconds
from unspool.training.config import StageConfig

MEMORY_GOAL, TIME_GOAL = 0.10, 0.15
PLANNED: dict[str, Case] = {name: (SHORT | CASES)[name] for name in ("8b-8k", "8b-64k", "8b-128k", "135m-32k")}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    peak_gib: float
    step_seconds: float
    parts: dict[str, float]
    seconds: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=PLANNED, default=list(PLANNED))
    parser.add_argument("--again", action="store_true", help="measure all cases, also those in results/train.json")
    parser.add_argument("--calibrate", action="store_true", help="measure a few layers of each case as well")
    parser.add_argument("--save", action="store_true", help="write results/plan.json")
    parser.add_argument("--one", choices=("layers",), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        require_gpu()
        print(json.dumps(measured_layers(args.cases[0])))
        return
    print(machine() if torch.cuda.is_available() else "no GPU: comparing only the results of train.py", flush=True)
    results = {}
    for name in args.cases:
        found = compared(name, known_step(name, again=args.again), calibrate=args.calibrate)
        results[name] = found
        print(told(name, found), flush=True)
    if args.save:
        save("plan.json", {"goals": {"memory": MEMORY_GOAL, "time": TIME_GOAL}, "cases": results})


def known_step(name: str, *, again: bool) -> dict[str, Any] | None:
    """Measurement of a case, from this run or from train.py; None if there is none."""
    path = RESULTS / "train.json"
    if not again and path.is_file():
        found = json.loads(path.read_text())["cases"].get(name, {}).get("loop", {})
        if found.get("step_seconds"):
            step = median(found["step_seconds"])
            return {
                "peak_gib": found["memory_gib"],
                "step_seconds": step,
                "settings": found["settings"],
                "from": "train.json",
            }
    if not torch.cuda.is_available():
        return None
    with tempfile.TemporaryDirectory() as folder:
        result = in_own_process(str(Path(__file__).with_name("train_columns.py")), "loop", name, folder)
    if isinstance(result, int):
        return None
    return {"peak_gib": result["memory_gib"], "step_seconds": median(result["step_seconds"]), "from": "this run"}


def measured_layers(name: str) -> dict[str, Any]:
    case = PLANNED[name]
    found = measure(shape_of(case), stage_of(case), documents([case.length]), own_gpu(), torch.device("cuda"))
    return {key: getattr(found, key) for key in ("layers", "rest", "activations", "tokens", "seconds")}


def own_gpu() -> Gpu:
    properties = torch.cuda.get_device_properties(0)
    return match_gpu(properties.name, float(properties.total_memory)) or REFERENCE


def compared(name: str, measured: dict[str, Any] | None, *, calibrate: bool) -> dict[str, Any]:
    gpu = own_gpu() if torch.cuda.is_available() else REFERENCE
    # The settings of the measurement, which may differ from the current ones.
    settings = (measured or {}).get("settings", PLANNED[name].settings)
    case = replace(PLANNED[name], settings=settings)
    found: dict[str, Any] = {"predicted": vars(predicted(case, gpu)), "measured": measured}
    if measured is not None:
        found["ratios"] = ratios(found["predicted"], measured)
    if calibrate and torch.cuda.is_available():
        factors = in_own_process(__file__, "--cases", name, "--one", "layers")
        if not isinstance(factors, int):
            again = predicted(case, gpu, factors)
            found["calibrated"] = {"factors": factors, "predicted": vars(again)}
            if measured is not None:
                found["calibrated"]["ratios"] = ratios(vars(again), measured)
    return found


def ratios(wanted: dict[str, Any], measured: dict[str, Any]) -> dict[str, float]:
    """Ratio of predicted to measured."""
    return {
        "memory": wanted["peak_gib"] / measured["peak_gib"],
        "time": wanted["step_seconds"] / measured["step_seconds"],
    }


def predicted(case: Case, gpu: Gpu, factors: dict[str, Any] | None = None) -> Predicted:
    shape, stage = shape_of(case), stage_of(case)
    setup = StepSetup(
        tokens=case.length,
        micro_batches=case.rows_per_step,
        policy=stage.memory,
        optimizer=stage.optimizer,
        compiled=True,
    )
    speed = device_speed(gpu)
    if factors is not None:
        speed = replace(speed, layers=factors["layers"], rest=factors["rest"])
    memory, seconds = footprint(shape, setup), step_seconds(shape, setup, documents([case.length]), speed)
    grown = sum(getattr(memory, part) for part in ("checkpoints", "kept", "layer", "batch"))
    device = memory.device + (factors["activations"] - 1 if factors else 0) * grown
    return Predicted(
        peak_gib=device / GIB,
        step_seconds=seconds.step,
        parts={part: round(getattr(memory, part) / GIB, 2) for part in PARTS} | {"host": round(memory.host / GIB, 2)},
        seconds={part: round(value, 4) for part, value in vars(seconds).items()},
    )


def shape_of(case: Case) -> Shape:
    values = case.shape
    return Shape(
        num_layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        intermediate=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        num_kv_heads=values["num_key_value_heads"],
        head_dim=values["hidden_size"] // values["num_attention_heads"],
        vocabulary=values["vocab_size"],
        tied=values.get("tie_word_embeddings", False),
    )


def stage_of(case: Case) -> StageConfig:
    tokens = case.length * case.rows_per_step
    plain = {
        "name": "bench",
        "context_length": case.length,
        "mix": {"rows": 1.0},
        "tokens": tokens,
        "batch_tokens": tokens,
        "lr": 1e-5,
    }
    return StageConfig.model_validate(plain | case.settings | {"compile": True})


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def told(name: str, found: dict[str, Any]) -> str:
    wanted, measured = found["predicted"], found["measured"]
    text = f"{name}: predicted {wanted['peak_gib']:.1f} GiB, {wanted['step_seconds']:.2f} s"
    if measured is None:
        return f"{text}; not measured"
    text += f"; measured {measured['peak_gib']:.1f} GiB, {measured['step_seconds']:.2f} s ({measured['from']})"
    text += f"; ratios {verdict(found['ratios'])}"
    if "calibrated" in found:
        text += f"; calibrated {verdict(found['calibrated']['ratios'])}"
    return text


def verdict(found: dict[str, float]) -> str:
    memory, seconds = found["memory"], found["time"]
    good = abs(memory - 1) <= MEMORY_GOAL and abs(seconds - 1) <= TIME_GOAL
    return f"{memory:.3f} memory, {seconds:.3f} time, {'within' if good else 'OUTSIDE'} the goal"


if __name__ == "__main__":
    main()
