"""How fast training is on one GPU: the product, its bare loop, and stock `transformers` with Liger's kernels.

    python benchmarks/train.py [--cases 135m-32k 8b-64k 8b-prolong 8b-128k] [--columns product loop peer]
        [--budget 400] [--rounds 2] [--layers 16] [--profile] [--save]
    python benchmarks/train.py --add FILE   add what a run on another machine wrote with --out

- product: `unspool train` with a recipe. A step lasts from the end of the one before, on the device, to its own, so
  that the loader, metrics, logs and checkpoints (135M: one every eight steps; 8B: none, for host memory) count. Weights
  are drawn on the device instead of read, and the process is ended after its last step that counts.
- loop: optimizer steps of the same stage on the same rows, and nothing else. The product should reach 97% of it.
- peer: Liger's kernels, SDPA, gradient checkpointing (8B), torch's fused AdamW in bf16. It has no document mask, so
  that ProLong's mix (five rows of one document to three of short ones) costs it what 64K costs.

Ours has bf16 weights with stochastic rounding and 8-bit moments at 8B (Llama-3's shape) and fp32 masters at 135M
(SmolLM2's shape, four rows of 32K a step). Each case and column is a process of its own; every other case and round
goes through the columns backwards. In a budget the peer is last, and when the budget is spent, what there is counts.
With `--save`, results/train.json gets every step's seconds; cases that were not run keep what they had.
Liger is pure Python: `pip download --no-deps liger-kernel`, unzip it, name the folder in PYTHONPATH.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import CASES
from processes import in_own_process

COLUMNS = ("product", "loop", "peer")
RESULTS = Path(__file__).parent / "results" / "train.json"
LOOP_GOAL = 0.97  # of the loop's rate
LEAST_SECONDS = 20.0  # with less left, no column is started
NO_GPU = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after that long")
    parser.add_argument("--rounds", type=int, default=1, help="times that everything is measured")
    parser.add_argument("--layers", type=int, help="fewer layers of the 8B shape, in every column")
    parser.add_argument("--profile", action="store_true", help="also record where the time of a step goes")
    parser.add_argument("--save", action="store_true", help=f"write results/{RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="another file to write")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, to try the benchmark itself")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="add what --out wrote, run nothing")
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
            if args.save or args.out != RESULTS:
                write(args.out, results)
    print(table(results))
    for case, columns in results.items():
        for line in profile_lines(case, columns):
            print(line)


def order(cases: list[str], columns: list[str], rounds: int, *, in_budget: bool) -> list[tuple[str, str]]:
    """Cases as given. Columns alternate, so that none is always the one on a warm machine; in a budget the peer, whose
    rate changes least, is the last in the first round, and only the others alternate.
    """
    found = []
    for turn in range(rounds):
        for number, case in enumerate(cases):
            own = [column for column in columns if column != "peer" or CASES[case].same_peer not in cases]
            if (turn + number) % 2:
                own.reverse()
            if in_budget and turn == 0:
                own.sort(key=lambda column: column == "peer")
            found += [(case, column) for column in own]
    return found


def measure(case: str, column: str, folder: Path, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    if seconds < LEAST_SECONDS:
        print(f"{case} {column}: not run, the budget is spent", flush=True)
        return {"error": "not run, the budget was spent"}
    began = time.monotonic()
    options = ["--small"] * args.small + ["--profile"] * (args.profile and column != "peer")
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


def add_column(case: dict[str, Any], column: str, found: dict[str, Any]) -> None:
    """A later round adds its steps; the rate is then the mean of the rounds'."""
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
    """Of the product's rate to the others'."""
    product = columns.get("product", {}).get("tokens_per_second")
    rates = {name: side.get("tokens_per_second") for name, side in (("loop", columns.get("loop", {})), ("peer", peer))}
    return {f"product_to_{name}": round(product / rate, 4) for name, rate in rates.items() if product and rate}


def peer_of(case: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the case's rates are compared with, perhaps measured for another case."""
    candidates = [results.get(name or "", {}).get("peer", {}) for name in (case, CASES[case].same_peer)]
    return next((found for found in candidates if "tokens_per_second" in found), {})


def read_columns(path: Path) -> dict[str, dict[str, Any]]:
    """The columns of each case in a file of results; none if there is no file."""
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
    return "\n".join(lines)


def _rate(column: dict[str, Any]) -> str:
    return f"{column['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in column else "–"


def profile_lines(case: str, columns: dict[str, Any]) -> list[str]:
    """Where the time of a step goes, per column."""
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
