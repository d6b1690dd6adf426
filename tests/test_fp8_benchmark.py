"""The benchmark of FP8 products, on a CPU, where torch casts and multiplies."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import fp8_layer


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fp8_layer.py", "--small"])
    fp8_layer.main()
    assert "times as fast as bf16" in capsys.readouterr().out


def test_errors_are_those_of_one_rounding() -> None:
    part = fp8_layer.random_part(48, 64, (32, 16, 16), "cpu")
    for values in fp8_layer.errors(*part).values():
        assert len(values) == 7 and all(0.01 < value < 0.1 for value in values)
