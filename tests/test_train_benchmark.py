"""benchmarks/train.py: the order of its columns, its rates and ratios, its budget, and a whole run on tiny shapes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import unspool

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("train")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("cases")


def column(rate: float) -> dict[str, Any]:
    return {"tokens_per_second": rate, "step_seconds": [1.0], "kinds": ["whole"]}


def test_columns_alternate_and_a_peer_is_measured_once(train: Any) -> None:
    cases, columns = ["135m-32k", "8b-64k", "8b-prolong"], ["product", "loop", "peer"]
    assert train.order(cases, columns, 1, in_budget=False) == [
        *(("135m-32k", name) for name in ("product", "loop", "peer")),
        ("8b-64k", "peer"),
        *(("8b-prolong", name) for name in ("product", "loop")),
    ]
    twice = train.order(["135m-32k"], columns, 2, in_budget=True)
    assert [name for _, name in twice] == ["product", "loop", "peer", "peer", "loop", "product"]
    both = train.order(["135m-32k", "8b-64k"], columns, 1, in_budget=True)
    assert [name for _, name in both] == ["product", "loop", "loop", "product", "peer", "peer"]


def test_a_step_counts_after_each_kind_of_row_has_come(cases: Any) -> None:
    kinds = ["whole", "short", "whole", "whole", "short"]
    assert cases.plan_steps(cases.CASES["8b-prolong"]) == list(
        zip(kinds, [False, False, True, True, True], strict=True)
    )
    assert [counts for _, counts in cases.plan_steps(cases.CASES["135m-32k"])] == [False] + 10 * [True]


@pytest.mark.parametrize("kind", ["CASES", "LENGTHS", "PLANNED"])
def test_recipes_of_full_size_are_valid_and_fit_one_gpu(cases: Any, kind: str, tmp_path: Path) -> None:
    for name, case in getattr(cases, kind).items():
        cases.write_model_files(case, tmp_path / name / "model")
        recipe = cases.write_recipe(case, tmp_path / name, "run", model=tmp_path / name / "model", steps=4)
        plan = unspool.plan(str(recipe), gpu="h200", count=1)
        assert plan.fits, name


def test_columns_that_are_not_measured_by_default_are_compared_too(train: Any) -> None:
    columns = {
        "product": column(60),
        "loop": column(64),
        "peer": column(50),
        "peer-plain": column(75),
        "fp8": column(80),
    }
    assert train.ratios(columns, columns["peer"]) == {
        "product_to_loop": 0.9375,
        "product_to_peer": 1.2,
        "product_to_peer-plain": 0.8,
        "fp8_to_loop": 1.25,
    }
    shown = train.table({"8b-8x8k": columns})
    assert "without gradient checkpointing (75 tokens/s) 0.800" in shown
    assert "in FP8: 80 tokens/s, 1.25 of its loop" in shown


def test_kinds_of_rows_are_weighed_by_the_mix(cases: Any) -> None:
    samples = [("whole", 12.0), ("whole", 12.4), ("short", 6.0)]
    assert cases.tokens_per_second(cases.CASES["8b-prolong"], samples) == pytest.approx(
        65536 / ((5 * 12.2 + 3 * 6) / 8)
    )


def test_whole_rows_of_the_mix_count_as_64k(train: Any, cases: Any) -> None:
    found = {"tokens_per_second": 1.0, "step_seconds": [12.0, 6.0, 13.0], "kinds": ["whole", "short", "whole"]}
    case = cases.CASES["8b-64k"]
    expected = {"tokens_per_second": round(65536 / 12.5, 1), "step_seconds": [12.0, 13.0], "kinds": ["whole"] * 2}
    assert train.whole_rows(found, case) == expected
    assert train.whole_rows({"error": "ended"}, case) == {"error": "ended"}
    twin = cases.CASES[case.same_steps]
    assert (case.settings, case.length, case.shape) == (twin.settings, twin.length, twin.shape)


def test_results_of_two_runs_are_joined_and_old_columns_dropped(train: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"cases": {"8b-128k": {"ours": column(1), "goal": 3200}}}))
    train.write(path, {"8b-64k": {"product": column(970), "peer": column(500)}})
    train.write(path, {"8b-64k": {"loop": column(1000)}, "8b-prolong": {"product": column(1200)}})
    cases = json.loads(path.read_text())["cases"]
    assert set(cases) == {"8b-64k", "8b-prolong"}
    assert (cases["8b-64k"]["product_to_loop"], cases["8b-64k"]["product_to_peer"]) == (0.97, 1.94)
    assert cases["8b-prolong"]["product_to_peer"] == 2.4  # the peer's rate is that of 8b-64k


def test_a_miss_is_marked_in_the_table(train: Any) -> None:
    lines = train.table({"135m-32k": {"product": column(960), "loop": column(1000)}}).splitlines()
    assert lines[-1] == "| 135m-32k | 960 tokens/s | 1,000 tokens/s | 0.960 (goal 0.97) | – | – |"


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "train.py", "--small", "--budget", "1", "--out", tmp_path / "train.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("not run, budget spent") == 9
    found = json.loads((tmp_path / "train.json").read_text())["cases"]
    assert "error" in found["8b-64k"]["product"]


def test_a_column_that_is_ended_counts_with_what_it_printed(train: Any, tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import json, time\nprint(json.dumps({'steps': 1}), flush=True)\ntime.sleep(60)\n")
    processes = importlib.import_module("processes")
    assert processes.in_own_process(str(script), seconds=1.0) == {"steps": 1}
    script.write_text("raise SystemExit(3)")
    assert processes.in_own_process(str(script), seconds=60.0) == 3


@pytest.mark.slow
def test_product_loop_and_peer_on_tiny_shapes(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "train.py", "--small", "--cases", "8b-prolong"]
    done = subprocess.run(
        [*command, "--profile", "--out", tmp_path / "train.json"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads((tmp_path / "train.json").read_text())["cases"]["8b-prolong"]
    for name in ("product", "loop", "peer"):
        assert found[name]["kinds"] == ["whole", "whole", "short"]
        assert len(found[name]["step_seconds"]) == 3
        assert f"8b-prolong {name}: " in done.stdout
    assert found["product_to_loop"] > 0
    assert len(found["product"]["logged"]) >= 2
