"""benchmarks/loss_weights.py and long_context_gain.py: the order of measurements, ratios, and a run on tiny shapes."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def loss_weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("loss_weights")


def test_kinds_alternate_and_ratios_are_to_plain_loss(loss_weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, trained = [0.0], []
    cost = {"uniform": 2.0, "exact": 2.5, "longce": 4.0}
    monkeypatch.setattr(loss_weights, "synchronized_time", lambda: clock[0])
    monkeypatch.setattr(loss_weights.time, "perf_counter", lambda: clock[0])

    def step(batches: tuple[str, int]) -> float:
        kind, number = batches
        trained.append(batches)
        # Compilation counts for nothing.
        clock[0] += cost[kind] if number > loss_weights.WARMUP else 100.0
        return 0.0

    lines = loss_weights.measure(lambda kind, number: (kind, number), step, rounds=2, tokens=1000)
    assert trained[-6:] == [(kind, 3) for kind in cost] + [(kind, 4) for kind in reversed(cost)]
    assert [line["ratio"] for line in lines] == [1.0, 1.25, 2.0]
    assert lines[2]["tokens_per_second"] == 250 and lines[2]["step_seconds"] == [4.0, 4.0]


@pytest.mark.slow
def test_both_run_on_tiny_shapes(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, BENCHMARKS / "loss_weights.py", "--small", "--rounds", "1", "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    assert [line["loss"] for line in json.loads(out.read_text())["kinds"]] == ["uniform", "exact", "longce"]
    sizes = ["--long", "128", "--short", "32", "--length", "128", "--documents", "2"]
    command = [sys.executable, BENCHMARKS / "long_context_gain.py", "--small", *sizes]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # One pass over 128 tokens, and twelve windows of 33 tokens, eight tokens apart.
    assert shown.startswith("2 documents, 256 tokens, contexts of 128 and 32") and "26 passes, 4.09 tokens" in shown
