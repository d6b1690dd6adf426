"""The benchmark of long sequences goes through, on a toy, and chooses what host memory allows."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "long_sequence.py"
GIB = 1 << 30


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        # As for a script, whose folder comes first.
        patch.syspath_prepend(PATH.parent)
        yield importlib.import_module("long_sequence")


def test_the_toy_goes_through_and_says_what_it_took(benchmark, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["long_sequence.py", "--dry", "--save"])
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "long.json")

    benchmark.main()

    lines = capsys.readouterr().out
    results = json.loads((tmp_path / "long.json").read_text())["lengths"]
    assert [result["outcome"] for result in results] == ["done", "done"]
    assert "512: forward done" in lines
    assert "offload, tiles of 128" in lines
    # Random weights know nothing: the loss is that of guessing.
    assert results[0]["loss"] == pytest.approx(torch.tensor(512.0).log().item(), abs=0.5)


def test_too_little_time_is_a_result_that_says_how_far_it_got(benchmark):
    result = benchmark.measure(benchmark.TOY, 64, torch.device("cpu"), seconds=0)

    assert result["outcome"] == "out of time in forward, layer 0 of 6"


def test_too_little_memory_is_a_result_that_says_how_far_it_got(benchmark, monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\nmore")

    monkeypatch.setattr(benchmark, "summed_loss", exhausted)
    result = benchmark.measure(benchmark.TOY, 64, torch.device("cpu"), seconds=60)

    assert result["outcome"].startswith("out of memory in forward, layer 5 of 6: CUDA out of memory")


@pytest.mark.parametrize(("length", "every"), [(256 << 10, 1), (512 << 10, 2), (1 << 20, 3)])
def test_checkpoints_fit_into_host_memory(benchmark, length, every):
    policy = benchmark.choose_policy(benchmark.LLAMA_8B, length, 120 * GIB)

    assert policy.layers_per_checkpoint == every
    assert (-(-32 // every) - 1) * length * 4096 * 2 <= 0.7 * 120 * GIB
