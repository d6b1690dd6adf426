"""The GPU gate: when it calls itself outdated, and its parts on tiny shapes."""

import argparse
import ast
import importlib
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
GATE = BENCHMARKS / "gate.py"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gate")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("models/load.py", "training/loop.py", "planning/calibration.py", "reporting/page.py"):
        path = tmp_path / "src" / "unspool" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src" / "unspool" / name, path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    return tmp_path


def write_result(gate: Any, tree: Path, *, passed: bool = True) -> None:
    facts = {"commit": "0123456789abcdef", "sources": gate.digest_sources(tree), "passed": passed}
    (tree / "benchmarks" / "results" / "gate.json").write_text(json.dumps(facts))


def test_a_tree_without_a_result_is_told_to_run_the_gate(gate: Any, tree: Path) -> None:
    assert gate.freshness(tree) == "GPU gate: never run on this tree; run `make gpu` on a machine with a GPU."


def test_parts_of_a_stopped_run_come_from_another_run_of_the_same_code_only(gate: Any, tmp_path: Path) -> None:
    *done, last = gate.PARTS
    ran = {"commit": "b", "sources": "s", "seconds": 9, "parts": {name: {"passed": True} for name in done}}
    own, other = tmp_path / "gate.json", tmp_path / "other.json"
    own.write_text(json.dumps(ran))
    failed = {"passed": False}
    other.write_text(json.dumps(ran | {"commit": "a", "parts": {done[0]: failed, last: {"passed": True}}}))

    gate.add_parts(other, own)

    found = json.loads(own.read_text())
    assert (found["passed"], found["not_run"], found["commit"]) == (True, [], "b")
    assert found["parts"][last] == {"passed": True, "commit": "a"}
    own.write_text(json.dumps(ran | {"sources": "t"}))
    with pytest.raises(SystemExit, match="its GPU code differs"):
        gate.add_parts(other, own)
    own.unlink()
    with pytest.raises(SystemExit, match=r"gate\.json: there is no such file"):
        gate.add_parts(other, own)


@pytest.mark.parametrize("changed", ["training/loop.py", "planning/calibration.py"])  # the second imports torch
def test_a_change_of_a_gpu_file_makes_the_result_old_and_another_does_not(gate: Any, tree: Path, changed: str) -> None:
    write_result(gate, tree)
    assert gate.freshness(tree) == "GPU gate: passed on this code (commit 0123456789ab)."
    page = tree / "src" / "unspool" / "reporting" / "page.py"
    page.write_text(page.read_text() + "\nmore = 1\n")
    assert "passed on this code" in gate.freshness(tree)
    path = tree / "src" / "unspool" / changed
    path.write_text(path.read_text() + "\n# more\n")
    assert "passed on this code" in gate.freshness(tree)
    path.write_text(path.read_text() + "\nmore = 1\n")
    assert gate.freshness(tree) == (
        "GPU gate: WARNING: files that run on a GPU changed since it ran (commit 0123456789ab); run `make gpu` on a "
        "machine with a GPU."
    )


SLOW_PART = """
import subprocess, sys, time
print("test_one FAILED", file=sys.stderr, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[sys.argv.index("--work") + 1] + "/pid", "w").write(str(child.pid))
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_part_that_outlasts_the_budget_is_killed_with_its_processes_and_shows_what_it_printed(
    gate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "part.py"
    script.write_text(SLOW_PART)
    result = gate.in_own_process(script, "tests", tmp_path, small=True, limit=3.0)
    assert not result["passed"]
    assert result["reason"] == "stopped after 3 s, when the time of --budget was over"
    assert "tests: test_one FAILED" in capsys.readouterr().err
    pid = int((tmp_path / "pid").read_text())
    for _ in range(300):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid), "the child of the part still runs"
    late = gate.in_own_process(script, "tests", tmp_path, small=True, limit=-1.0)
    assert (late["passed"], late["reason"]) == (False, "not started, because the time of --budget was over")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_gate_leaves_no_part_behind(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "part.py"
    script.write_text(SLOW_PART)
    code = f"""
import signal, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
import gate
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run = lambda name: gate.in_own_process(Path({str(script)!r}), name, Path({str(tmp_path)!r}), small=True)
gate.run_in_order(["tests"], run, print)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    pid = tmp_path / "pid"
    for _ in range(600):
        if pid.is_file() and pid.read_text():
            break
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(60) != 0
    for _ in range(300):
        if not is_running(int(pid.read_text())):
            break
        time.sleep(0.1)
    assert not is_running(int(pid.read_text())), "the child of the part still runs"


def test_some_parts_can_be_written_to_a_file_of_their_own(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def part(script: Path, name: str, work: Path, *, small: bool, limit: float | None) -> dict[str, Any]:
        limits.append(limit)
        return {"passed": True, "seconds": 1.0}

    monkeypatch.setattr(gate, "in_own_process", part)
    monkeypatch.setattr(gate, "RESULT", tmp_path / "gate.json")
    monkeypatch.setattr(importlib.import_module("gpu"), "machine", dict)
    given = argparse.Namespace(only=["export"], out=tmp_path / "more.json", work=tmp_path, commit="c", small=False)
    given.budget = 100.0
    assert gate.run_all(given) == 0
    found = json.loads((tmp_path / "more.json").read_text())
    assert set(found["parts"]) == {"model-135m", "135m-32k", "export"} and "tests" in found["not_run"]
    assert not found["passed"] and not (tmp_path / "gate.json").exists()
    assert all(0 < limit <= 100 for limit in limits)


SOURCE = '''"""A module."""

import torch  # the only one


def halve(values, text="a # b"):
    """Return half.

    In two paragraphs.
    """
    # Exact in floats.
    return values / 2, text, f"{text!r:>9} # {values}", """x

# kept
"""


class Fault(Exception):
    "A docstring without a second line."
'''


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# Exact in floats.", "# Division by two is exact."),
        ("    # Exact in floats.\n", ""),
        ("  # the only one", ""),
        ('b"):', 'b"):  # why # twice'),
        ('"""A module."""', '"""A module, with \'quotes\' and é."""'),
        ('    """Return half.\n\n    In two paragraphs.\n    """\n', ""),
        ("In two paragraphs.", "In three # paragraphs."),
        ('"A docstring without a second line."', '"""A docstring\n\n    with one.\n    """'),
        ("\n\n\nclass", "\n\nclass"),
    ],
)
def test_comments_docstrings_and_blank_lines_are_not_code(gate: Any, before: str, after: str) -> None:
    assert before in SOURCE
    assert gate.code_only(SOURCE.replace(before, after)) == gate.code_only(SOURCE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("values / 2", "values / 3"),
        ("a # b", "a # c"),
        ("# {values}", "# {text}"),
        ("# kept", "# changed"),
        ("x\n\n#", "x\n#"),
        ("    return values", "    if text:\n        return values"),
        ("(Exception)", "(OSError)"),
        ("import torch  #", "# import torch"),
        ('"A docstring without', 'f"A docstring without'),
    ],
)
def test_statements_and_strings_are_code(gate: Any, before: str, after: str) -> None:
    assert before in SOURCE
    assert gate.code_only(SOURCE.replace(before, after)) != gate.code_only(SOURCE)


def test_the_code_that_counts_is_exactly_this(gate: Any) -> None:
    """The same text under every Python version, so that a digest of one is valid under another."""
    assert (
        gate.code_only(SOURCE)
        == '''import torch
def halve(values, text="a # b"):
    return values / 2, text, f"{text!r:>9} # {values}", """x

# kept
"""
class Fault(Exception):
'''
    )


def test_no_code_of_the_package_is_lost(gate: Any) -> None:
    """What is left has the tree of the source, apart from docstrings."""
    checked = 0
    for path in sorted((ROOT / "src" / "unspool").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        try:
            left = ast.parse(gate.code_only(source))
        except IndentationError:  # a body that was only a docstring
            continue
        assert _without_docstrings(left) == _without_docstrings(ast.parse(source)), path
        checked += 1
    assert checked > 200


def _without_docstrings(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree)


def test_a_gate_that_failed_says_so(gate: Any, tree: Path) -> None:
    write_result(gate, tree, passed=False)
    assert "WARNING: it failed or did not end on this code" in gate.freshness(tree)


def test_check_loads_no_torch_and_never_fails() -> None:
    command = [sys.executable, "-X", "importtime", GATE, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("GPU gate: ")
    assert done.stdout.count("\n") == 1
    assert "torch" not in done.stderr


def test_parts_are_run_with_those_they_need(gate: Any) -> None:
    assert gate.with_needed(["ruler"]) == ["model-135m", "135m-32k", "export", "ruler"]
    assert gate.with_needed(["tests"]) == ["tests"]


def test_measured_parts_run_alone_and_after_what_they_need(gate: Any) -> None:
    running: set[str] = set()
    beside: dict[str, set[str]] = {}
    done: list[str] = []
    lock = threading.Lock()

    def run(name: str) -> dict[str, Any]:
        with lock:
            running.add(name)
            for other in running:
                beside.setdefault(other, set()).update(running - {other})
        assert set(gate.needed(name)) <= set(done)
        time.sleep(0.01)
        with lock:
            running.remove(name)
        return {}

    gate.run_in_order(list(gate.PARTS), run, lambda name, result: done.append(name))
    assert sorted(done) == sorted(gate.PARTS)
    assert not any(beside[name] for name in gate.ALONE)
    assert {"verify", "resume", "export"} <= beside["tests"]


def test_the_check_line_is_part_of_make_check() -> None:
    lines = (ROOT / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    assert "benchmarks/gate.py --check" in lines


@pytest.mark.slow
def test_every_part_passes_on_tiny_shapes() -> None:
    parts = ["8b-64k", "8b-prolong", "8b-128k", "resume", "fp8", "generation", "ruler", "verify"]
    done = subprocess.run(
        [sys.executable, GATE, "--small", "--only", *parts], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed") == len(parts) + 5  # both models, 135m-32k, export, and the last line


@pytest.mark.slow
def test_planted_faults_are_seen() -> None:
    """SDPA in the kept region, a wrong mask, no optimizer state, wrong gradients: each for its own reason."""
    command = [sys.executable, BENCHMARKS / "gate_faults.py", "--small"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\nseen  ") + done.stdout.startswith("seen  ") == 4
