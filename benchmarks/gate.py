"""The GPU gate: check everything that runs on a GPU. Needs one GPU; installs nothing.

    python benchmarks/gate.py --commit HASH    run all parts and write results/gate.json
    python benchmarks/gate.py --only verify    run some parts, write nothing without --out FILE
    python benchmarks/gate.py --add FILE       fill in parts that were not run from a gate.json of the same GPU code
    python benchmarks/gate.py --check          print whether GPU code changed since the gate passed; needs no GPU

The parts are in gate_parts.py. Each runs in its own process, so that caches of one part cannot hide a fault from the
next. Parts whose speed is not measured run in parallel. gate_faults.py checks that the gate detects faults.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from tokenize import TokenInfo
from typing import IO, Any

from gate_parts import ALONE, NEEDS, PARTS, Gate, run_part
from processes import environment

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gate.json"
# GPU code: these packages, and every other file that imports torch. Tests on CPUs cover the rest.
GPU_SOURCES = ("rope", "models", "training", "verification", "evals/backends", "inspection/attention")
IMPORTS_TORCH = re.compile(r"^\s*(import|from) (torch|triton)\b", re.MULTILINE)
LOG_LINES = 60  # printed for a part that failed
# Processes of parts. Each leads a session of its own, so that it can be killed with those that it started.
_active: set[subprocess.Popen[str]] = set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", help="hash of the commit under test, written into gate.json")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="run these parts and those they need; write only --out"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="stop what still runs after this time")
    parser.add_argument("--add", type=Path, metavar="FILE", help="add parts of another run on the same GPU code")
    parser.add_argument("--check", action="store_true", help="compare gate.json with the code, run nothing")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU, to try the gate itself")
    parser.add_argument("--work", type=Path, help="folder for models and runs; default: memory if there is enough")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        print(freshness())
        return
    if args.add:
        add_parts(args.add)
        print(freshness())
        return
    if args.part:
        run_part(Gate(args.work, small=args.small), args.part)
        return
    if not args.small:
        from gpu import require_gpu

        require_gpu()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(run_all(args))


def run_all(args: argparse.Namespace) -> int:
    began = time.monotonic()
    wanted = with_needed(args.only) if args.only else list(PARTS)
    out = None if args.small else args.out or (None if args.only else RESULT)
    results: dict[str, dict[str, Any]] = {}

    def run(name: str) -> dict[str, Any]:
        failed = next((need for need in needed(name) if not results[need]["passed"]), None)
        if failed:
            return {"passed": False, "reason": f"{failed} failed, which it needs", "seconds": 0.0}
        limit = None if args.budget is None else args.budget - (time.monotonic() - began)
        return in_own_process(Path(__file__), name, Path(folder), small=args.small, limit=limit)

    def note(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        print(describe(name, result), flush=True)
        if out is not None:  # after each part, so that a stopped gate leaves its results
            _write_result(out, args.commit, results, seconds=round(time.monotonic() - began, 1))

    with tempfile.TemporaryDirectory(prefix="gate-", dir=args.work or roomy_folder()) as folder:
        run_in_order(wanted, run, note)
    passed = all(result["passed"] for result in results.values())
    print(f"gate {'passed' if passed else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if passed else 1


def run_in_order(
    names: list[str], run: Callable[[str], dict[str, Any]], note: Callable[[str, dict[str, Any]], None]
) -> None:
    """Run each part once the parts it needs are done. A part of ALONE runs alone, before the parts listed after it."""
    waiting, running = list(names), dict[Future[dict[str, Any]], str]()
    with ThreadPoolExecutor(len(names)) as pool, kill_parts_on_error():
        while waiting or running:
            for name in list(waiting):
                open_needs = {*waiting, *running.values()}.intersection(needed(name))
                alone = name in ALONE
                if not open_needs and not (alone and running):
                    running[pool.submit(run, name)] = name
                    waiting.remove(name)
                if alone:
                    break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                note(running.pop(future), future.result())


@contextmanager
def kill_parts_on_error() -> Iterator[None]:
    """Kill the parts that run if the gate itself is interrupted or ended."""
    try:
        yield
    except BaseException:
        for process in list(_active):
            _kill(process)
        raise


def _kill(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _write_result(out: Path, commit: str | None, results: dict[str, dict[str, Any]], *, seconds: float) -> None:
    from gpu import machine

    # The digest decides, not the commit: later commits may change pages only.
    facts = {"commit": commit, "sources": digest_sources(), "passed": False, "seconds": seconds}
    _save(out, {**facts, "machine": machine(), "parts": results})


def add_parts(other: Path, result: Path = RESULT) -> None:
    """Add the parts that `result` lacks, from a run of the same GPU code that was not stopped there."""
    absent = next((path for path in (result, other) if not path.is_file()), None)
    if absent:
        sys.exit(f"{absent}: there is no such file; `gate.py` writes one on a machine with a GPU.")
    own, more = json.loads(result.read_text()), json.loads(other.read_text())
    if own["sources"] != more["sources"]:
        sys.exit(f"{other}: its GPU code differs from that of {result}; run the gate again.")
    added = {name: {**part, "commit": more["commit"]} for name, part in more["parts"].items()}
    _save(result, own | {"parts": added | own["parts"]})


def _save(path: Path, content: dict[str, Any]) -> None:
    parts = content["parts"]
    passed = len(parts) == len(PARTS) and all(part["passed"] for part in parts.values())
    not_run = [name for name in PARTS if name not in parts]
    path.write_text(json.dumps(content | {"passed": passed, "not_run": not_run}, indent=1) + "\n")


def needed(name: str) -> list[str]:
    """Parts whose files this part reads."""
    return [] if name not in NEEDS else [NEEDS[name], *needed(NEEDS[name])]


def with_needed(names: list[str]) -> list[str]:
    chosen = set(names).union(*(needed(name) for name in names))
    return [name for name in PARTS if name in chosen]


def in_own_process(
    script: Path, name: str, work: Path, *options: str, small: bool, limit: float | None = None
) -> dict[str, Any]:
    """Run a part; after `limit` seconds, kill it and the processes that it started."""
    began = time.monotonic()
    if limit is not None and limit <= 0:
        return {"passed": False, "reason": "not started, because the time of --budget was over", "seconds": 0.0}
    command = [sys.executable, script, "--part", name, "--work", work, *options, *(["--small"] if small else [])]
    # Parts that run in parallel must not use all cores each.
    threads = {"OMP_NUM_THREADS": "1"} if small else {} if name in ALONE else {"OMP_NUM_THREADS": "2"}
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, text=True, env=threads | environment(), start_new_session=True
        )
        _active.add(process)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            code = None
        _active.discard(process)
        lines, errors = _lines_of(stdout), _lines_of(stderr)
    result: dict[str, Any]
    if code is None:
        result = {"passed": False, "reason": f"stopped after {limit:.0f} s, when the time of --budget was over"}
    elif code or not lines or not lines[-1].startswith("{"):
        last = next((line for line in reversed(errors) if line), "no error output")
        result = {"passed": False, "reason": f"its process exited with code {code}: {last}"}
    else:
        result = json.loads(lines[-1])
    if not result["passed"]:
        sys.stderr.write("".join(f"{name}: {line}\n" for line in errors[-LOG_LINES:]))
    return result | {"seconds": round(time.monotonic() - began, 1)}


def _lines_of(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().splitlines()


def roomy_folder() -> str | None:
    """Return a RAM disk if the largest part fits; its files are written and read at once."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 48 * 2**30 else None


def describe(name: str, result: dict[str, Any]) -> str:
    shown = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "peak_gib": "{:.1f} GiB",
        "first_step_seconds": "first step {:.0f} s",
        "difference": "difference {:.1e}",
        "below_best_logit": "{:.3f} below the best logit",
        "tests": "{} tests",
        "failures": "{} failed",
        "skipped": "{} skipped",
        "checks": "{} checks",
        "answers": "{} answers",
        "reason": "{}",
    }
    facts = [text.format(result[key]) for key, text in shown.items() if key in result]
    return f"{'passed' if result['passed'] else 'FAILED'}  {name:<11} {result['seconds']:5.0f} s  {', '.join(facts)}"


# Whether the code changed since the gate ran


def digest_sources(root: Path = ROOT) -> str:
    """Return one digest over the GPU code, without comments and docstrings."""
    found = hashlib.sha256()
    base = root / "src" / "unspool"
    for path in sorted(base.rglob("*.py")):
        code, name = code_only(path.read_text(encoding="utf-8")), path.relative_to(base).as_posix()
        if name.startswith(tuple(f"{folder}/" for folder in GPU_SOURCES)) or IMPORTS_TORCH.search(code):
            found.update(f"{name}\0{code}\0".encode())
    return found.hexdigest()


def code_only(source: str) -> str:
    """Return source text without comments, docstrings and blank lines outside of strings.

    The rest of the text stays as it is, because Python versions split it into different tokens.
    """
    lines = source.split("\n")  # not splitlines, which also splits at form feeds
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
    statement: list[TokenInfo] = []
    depth = 0  # of f-strings, which are several tokens from Python 3.12 on and one before
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        depth += kind.endswith("STRING_START") - kind.endswith("STRING_END")
        if depth:
            statement.append(token)
        elif kind == "COMMENT":
            spans.append((token.start, token.end))
        elif kind == "NL" and not lines[token.start[0] - 1].strip():
            spans.append((token.start, token.start))
        elif kind in ("NEWLINE", "INDENT", "DEDENT"):
            if statement and all(_is_plain_string(one) for one in statement):
                spans.append((statement[0].start, statement[-1].end))
            statement = []
        elif kind != "NL":
            statement.append(token)
    for (first, start), (last, stop) in reversed(spans):
        before, after = lines[first - 1][:start].rstrip(), lines[last - 1][stop:].strip()
        lines[first - 1 : last] = [before + after] if before or after else []
    return "\n".join(lines)


def _is_plain_string(token: TokenInfo) -> bool:
    """True if the token is a string that is no f-string: as a statement it has no effect."""
    prefix = re.match("[a-z]*", token.string.lower())
    return token.type == tokenize.STRING and prefix is not None and "f" not in prefix[0]


def freshness(root: Path = ROOT) -> str:
    """Return one line: whether the gate passed on the current code."""
    path = root / RESULT.relative_to(ROOT)
    run = "run `make gpu` on a machine with a GPU"
    if not path.is_file():
        return f"GPU gate: never run on this tree; {run}."
    found = json.loads(path.read_text())
    seen = f"commit {(found.get('commit') or 'unknown')[:12]}"
    if found["sources"] != digest_sources(root):
        return f"GPU gate: WARNING: files that run on a GPU changed since it ran ({seen}); {run}."
    if not found["passed"]:
        return f"GPU gate: WARNING: it failed or did not end on this code ({seen}); see {RESULT.relative_to(ROOT)}."
    return f"GPU gate: passed on this code ({seen})."


if __name__ == "__main__":
    main()
