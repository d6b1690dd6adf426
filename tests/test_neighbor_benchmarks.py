"""What the benchmarks of busy and of long machines compute from their runs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield


def test_times_beside_busy_processes_are_ratios_of_medians():
    neighbor = importlib.import_module("neighbor")
    runs = [
        {"variant": "default", "busy": busy, "seconds": seconds}
        for busy, each in {0: (100.0, 102.0, 300.0), 1: (160.0, 170.0, 150.0), 2: (230.0, 231.0, 229.0)}.items()
        for seconds in each
    ]
    found = {line["busy"]: (line["times_idle"], line["reached"]) for line in neighbor.summarize(runs)}
    assert found == {0: (1.0, True), 1: (1.57, True), 2: (2.25, False)}


def test_cpu_time_of_a_process_is_read_from_the_kernel():
    neighbor = importlib.import_module("neighbor")
    if not Path("/proc/self/stat").is_file():
        pytest.skip("needs /proc")
    assert 0 < neighbor.process_seconds(int(Path("/proc/self").resolve().name)) <= neighbor.machine_seconds()


def test_what_all_layers_take_follows_from_two_runs():
    long_stage = importlib.import_module("long_stage")
    runs = [
        {"layers": layers, "length": 1024, "steps": 1, "step_seconds": 2.0 * layers + 10, "device_gib": float(layers)}
        for layers in (4, 12)
    ]
    lines = long_stage.scaling(runs)
    assert lines[:3] == [
        "step_seconds: 2.00 per layer, 74.0 for 32 layers",
        "tokens_per_second: 14 for 32 layers",
        "device_gib: 1.00 per layer, 32.0 for 32 layers",
    ]
    assert long_stage.scaling(runs[:1]) == []


def test_a_long_row_without_a_gpu_exits_with_code_2(monkeypatch):
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["long_stage.py"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("long_stage").main()
    assert ended.value.code == 2
