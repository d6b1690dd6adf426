"""How fast training is on one GPU: the product, its bare loop, and stock `transformers` with Liger's kernels.

    python benchmarks/train.py [--cases 135m-32k 8b-64k 8b-prolong 8b-128k] [--columns product loop peer]
        [--budget 400] [--rounds 2] [--layers 16] [--profile] [--save]
    python benchmarks/train.py --cases 8b-8x8k 8b-4x16k 8b-2x32k 8b-256k --columns loop peer peer-plain
    python benchmarks/train.py --add FILE   add the results that --out wrote on another machine

- product: `unspool train` with a recipe. A step is timed on the device from the end of the previous step to its own
  end, so the loader, metrics, logs and checkpoints count (135M: a checkpoint every eight steps; 8B: none, to save host
  memory). Weights are initialized on the device, and the process is killed after its last measured step.
- loop: optimizer steps of the same stage on the same rows, and nothing else. Goal: the product reaches 97% of it.
- peer: Liger's kernels, SDPA, gradient checkpointing (8B), torch's fused AdamW in bf16. It has no document mask, so
  ProLong's mix (five rows of one document to three of short ones) takes it as long as 64K.
- 8b-8x8k and the like, if asked for: what length costs (docs/results/cost.md); eight rows of 8K are one step.
- peer-plain, if asked for: the peer without gradient checkpointing, which short rows do not need.
- fp8, if asked for: the loop with `precision: fp8`.
- 8B at 64K and ProLong's mix differ only in their rows, so both are measured in one run.

Ours has bf16 weights with stochastic rounding and 8-bit moments at 8B (Llama-3's shape) and fp32 masters at 135M
(SmolLM2's shape, four rows of 32K per step). Each case and column runs in its own process; every other case and round
runs the columns in reverse order. With a budget the peer runs last, and the results so far count when it is spent.
`--save` writes every step's seconds to results/train.json; cases that were not run keep their results.
Liger is pure Python: `pip download --no-deps liger-kernel`, unzip it, add the folder to PYTHONPATH.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import CASES as HEADLINE
from cases import LENGTHS, Case, tokens_per_second
from processes import in_own_process

CASES = HEADLINE | LENGTHS
COLUMNS = ("product", "loop", "peer", "peer-plain", "fp8")
RESULTS = Path(__file__).parent / "results" / "train.json"
LOOP_GOAL = 0.97  # of the loop's rate
LEAST_SECONDS = 20.0  # with less left, no column is started
NO_GPU = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(HEADLINE))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS[:3]))
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after this time")
    parser.add_argument("--rounds", type=int, default=1, help="how often to measure everything")
    parser.add_argument("--layers", type=int, help="fewer layers of the 8B shape, in every column")
    parser.add_argument("--profile", action="store_true", help="also record how the time of a step is divided")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="write results to this file instead")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, to test the benchmark itself")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="add results that --out wrote; run nothing")
    args = parser.parse_args()
    if args.add:
        for path in args.add:
            write(args.out, read_columns(path))
        print(table(read_columns(args.out)))
        return
    deadline = time.monotonic() + args.budget
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        for case, column in order(args.cases, args.columns, args.rounds, in_budget=args.budget < float("inf")):
            found = measure(case, column, Path(folder) / case, deadline - time.monotonic(), args)
            add_column(results.setdefault(case, {}), column, found)
            for other in (name for name in args.cases if CASES[name].same_steps == case and column != "peer"):
                add_column(results.setdefault(other, {}), column, whole_rows(found, CASES[other]))
            if args.save or args.out != RESULTS:
                write(args.out, results)
    print(table(results))
    for case, columns in results.items():
        for line in profile_lines(case, columns):
            print(line)


def order(cases: list[str], columns: list[str], rounds: int, *, in_budget: bool) -> list[tuple[str, str]]:
    """Return the order of cases and columns. Columns alternate, so that no column always runs on a warm machine.

    With a budget, the peers of all cases run last in the first round, because their rates change least.
    """
    found = []
    for turn in range(rounds):
        for number, case in enumerate(cases):
            same = {"peer": CASES[case].same_peer}
            own = [column for column in columns if same.get(column, CASES[case].same_steps) not in cases]
            if (turn + number) % 2:
                own.reverse()
            found += [(case, column) for column in own]
        if in_budget and turn == 0:
            found.sort(key=lambda one: one[1].startswith("peer"))
    return found


def measure(case: str, column: str, folder: Path, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    if seconds < LEAST_SECONDS:
        print(f"{case} {column}: not run, budget spent", flush=True)
        return {"error": "not run, budget spent"}
    began = time.monotonic()
    options = ["--small"] * args.small + ["--profile"] * (args.profile and not column.startswith("peer"))
    options += ["--layers", str(args.layers)] if args.layers else []
    script = str(Path(__file__).with_name("train_columns.py"))
    limit = None if seconds == float("inf") else seconds
    found = in_own_process(script, column, case, str(folder), *options, seconds=limit)
    took = time.monotonic() - began
    if isinstance(found, int):
        if found == NO_GPU:
            sys.exit(NO_GPU)
        print(f"{case} {column}: ended with code {found} after {took:.0f} s", flush=True)
        return {"error": f"ended with code {found}"}
    steps = ", ".join(f"{one:.2f}" for one in found["step_seconds"])
    memory = f", {found['memory_gib']:.1f} GiB" if found["memory_gib"] else ""
    print(
        f"{case} {column}: {found['tokens_per_second']:,.0f} tokens/s{memory}, steps of {steps} s, the first "
        f"{found['first_step_seconds']:.1f} s, in all {took:.0f} s",
        flush=True,
    )
    return found | {"seconds": round(took, 1)}


def whole_rows(found: dict[str, Any], case: Case) -> dict[str, Any]:
    """The part of a column that was measured on rows of one document."""
    if "step_seconds" not in found:
        return found
    steps = [sample for sample in zip(found["kinds"], found["step_seconds"], strict=True) if sample[0] == "whole"]
    rate = {"tokens_per_second": round(tokens_per_second(case, steps), 1)}
    return found | rate | {"step_seconds": [one for _, one in steps], "kinds": [kind for kind, _ in steps]}


def add_column(case: dict[str, Any], column: str, found: dict[str, Any]) -> None:
    """Add the steps of a later round; the rate is then the mean over rounds."""
    known = case.get(column, {})
    if "step_seconds" in known and "step_seconds" in found:
        rates = [*known["rounds"], found["tokens_per_second"]]
        both = {key: [*known[key], *found[key]] for key in ("step_seconds", "kinds")}
        found = found | both | {"tokens_per_second": round(statistics.mean(rates), 1), "rounds": rates}
    elif "step_seconds" in found:
        found = found | {"rounds": [found["tokens_per_second"]]}
    if "step_seconds" in found or "step_seconds" not in known:
        case[column] = found


def ratios(columns: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    """Ratios of the product's rate to those of the other columns, and of FP8's to that of the loop."""
    product = columns.get("product", {}).get("tokens_per_second")
    sides = {"loop": columns.get("loop", {}), "peer": peer, "peer-plain": columns.get("peer-plain", {})}
    rates = {name: side.get("tokens_per_second") for name, side in sides.items()}
    found = {f"product_to_{name}": round(product / rate, 4) for name, rate in rates.items() if product and rate}
    fp8 = columns.get("fp8", {}).get("tokens_per_second")
    return found | ({"fp8_to_loop": round(fp8 / rates["loop"], 4)} if fp8 and rates["loop"] else {})


def peer_of(case: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The peer's result for a case; a case may use that of another one."""
    candidates = [results.get(name or "", {}).get("peer", {}) for name in (case, CASES[case].same_peer)]
    return next((found for found in candidates if "tokens_per_second" in found), {})


def read_columns(path: Path) -> dict[str, dict[str, Any]]:
    """Read the columns of each case from a results file; empty if there is no file."""
    cases = json.loads(path.read_text())["cases"] if path.is_file() else {}
    return {case: {name: found[name] for name in COLUMNS if name in found} for case, found in cases.items()}


def write(path: Path, results: dict[str, dict[str, Any]]) -> None:
    known = read_columns(path)
    merged = known | {case: known.get(case, {}) | columns for case, columns in results.items()}
    cases = {
        case: {**columns, **ratios(columns, peer_of(case, merged)), "goal": CASES[case].goal}
        for case, columns in merged.items()
        if columns
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"goals": {"product_to_loop": LOOP_GOAL}, "cases": cases}, indent=1) + "\n")


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| case | product | loop | product ÷ loop | peer | product ÷ peer |", "| --- " * 6 + "|"]
    for case, columns in results.items():
        peer = peer_of(case, results)
        found = ratios(columns, peer)
        rates = [_rate(columns.get(name, {})) for name in ("product", "loop")]
        to_loop, to_peer = (found.get(f"product_to_{name}") for name in ("loop", "peer"))
        goal = "" if to_loop is None or to_loop >= LOOP_GOAL else f" (goal {LOOP_GOAL})"
        shown = ["–" if ratio is None else f"{ratio:.3f}" for ratio in (to_loop, to_peer)]
        lines.append(f"| {case} | {rates[0]} | {rates[1]} | {shown[0]}{goal} | {_rate(peer)} | {shown[1]} |")
    lines += [
        f"{case}: product ÷ peer without gradient checkpointing ({_rate(columns['peer-plain'])}) "
        f"{ratios(columns, {})['product_to_peer-plain']:.3f}"
        for case, columns in results.items()
        if "product_to_peer-plain" in ratios(columns, {})
    ]
    lines += [
        f"{case} in FP8: {_rate(columns['fp8'])}, {ratios(columns, {}).get('fp8_to_loop', '–')} of its loop"
        for case, columns in results.items()
        if "fp8" in columns
    ]
    return "\n".join(lines)


def _rate(column: dict[str, Any]) -> str:
    return f"{column['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in column else "–"


def profile_lines(case: str, columns: dict[str, Any]) -> list[str]:
    """Print how the time of a step is divided, per column."""
    lines = []
    logged = columns.get("product", {}).get("logged")
    if logged:
        own = statistics.mean(columns["product"]["step_seconds"])
        inside, rows = (statistics.mean(step[key] for step in logged) for key in ("seconds", "data_seconds"))
        lines.append(f"{case} product: {own:.3f} s a step, {inside:.3f} by its own metrics, {rows:.4f} for its rows")
    for name, column in columns.items():
        if "profile" in column:
            found = column["profile"]
            kinds = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in found["kinds"].items())
            idle = found["step"] - sum(found["kinds"].values())
            lines.append(
                f"{case} {name}: {found['step']:.3f} s a step under the profiler: {kinds}, no kernel {idle:.3f}"
            )
            lines += [f"  {seconds:8.4f} s  {kernel}" for kernel, seconds in list(found["kernels"].items())[:15]]
    return lines


if __name__ == "__main__":
    main()
