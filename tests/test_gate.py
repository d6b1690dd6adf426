"""The GPU gate: when it calls itself outdated, and its parts on tiny shapes."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GATE = ROOT / "benchmarks" / "gate.py"


@pytest.fixture(scope="module")
def gate() -> Any:
    spec = importlib.util.spec_from_file_location("gate", GATE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("models/load.py", "training/loop.py", "reporting/page.py"):
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


def test_a_change_of_a_gpu_file_makes_the_result_old_and_another_does_not(gate: Any, tree: Path) -> None:
    write_result(gate, tree)
    assert gate.freshness(tree) == "GPU gate: passed on this code (commit 0123456789ab)."
    page = tree / "src" / "unspool" / "reporting" / "page.py"
    page.write_text(page.read_text() + "\n# more\n")
    assert "passed on this code" in gate.freshness(tree)
    loop = tree / "src" / "unspool" / "training" / "loop.py"
    loop.write_text(loop.read_text() + "\n# more\n")
    assert gate.freshness(tree) == (
        "GPU gate: WARNING: files that run on a GPU changed since it ran (commit 0123456789ab); run `make gpu` on a "
        "machine with a GPU."
    )


def test_a_gate_that_failed_says_so(gate: Any, tree: Path) -> None:
    write_result(gate, tree, passed=False)
    assert "WARNING: it failed or did not end on this code" in gate.freshness(tree)


def test_check_loads_no_torch_and_never_fails() -> None:
    code = f"import sys, runpy; sys.argv = ['gate.py', '--check']; runpy.run_path({str(GATE)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith("GPU gate: ")
    assert done.stdout.count("\n") == 1
    assert "torch" not in done.stderr


def test_parts_are_run_with_those_they_need(gate: Any) -> None:
    assert gate.with_needed(["ruler"]) == ["models", "135m-32k", "export", "ruler"]
    assert gate.with_needed(["tests"]) == ["tests"]


@pytest.mark.slow
def test_every_part_passes_on_tiny_shapes() -> None:
    parts = ["8b-64k", "8b-prolong", "8b-128k", "resume", "generation", "ruler", "verify"]
    done = subprocess.run(
        [sys.executable, GATE, "--small", "--only", *parts], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed") == len(parts) + 4  # models, 135m-32k, export, and the last line


@pytest.mark.slow
def test_a_resume_without_the_optimizer_state_fails(tmp_path: Path) -> None:
    for name in ("src", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    updater = tmp_path / "src" / "unspool" / "training" / "optim" / "updater.py"
    right = "        self.load_optimizer(saved)\n        self._previous_norm"
    assert right in updater.read_text()
    updater.write_text(updater.read_text().replace(right, "        self._previous_norm"))
    done = subprocess.run(
        [sys.executable, tmp_path / "benchmarks" / "gate.py", "--small", "--only", "resume"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "weights after a resume are off by" in done.stdout
