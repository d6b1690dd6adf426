"""docs/results/cost.md: points from recorded measurements, the roof, utilization, and a projection that is current."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results"


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("cost_data")


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("cost_blocks")


def test_points_are_measured_and_of_whole_models(data: Any) -> None:
    train = json.loads((MEASURED / "train.json").read_text())["cases"]
    found = {point.tokens: point for point in data.ours()}
    assert found[65536].tokens_per_second == train["8b-64k"]["product"]["tokens_per_second"]
    assert found[131072].peak_gib == train["8b-128k"]["loop"]["memory_gib"]
    assert set(found) == {8192, 65536, 131072, 524288}
    assert [point.tokens for point in data.peer()] == [65536, 131072]


def test_utilization_is_that_of_the_trainer(data: Any) -> None:
    """The trainer logged its own MFU, from the model's modules."""
    train = json.loads((MEASURED / "train.json").read_text())["cases"]
    found = {point.tokens: point.mfu for point in data.ours()}
    assert found[65536] == pytest.approx(train["8b-64k"]["product"]["mfu"], abs=1e-3)  # its last step
    assert found[131072] == pytest.approx(train["8b-128k"]["loop"]["mfu"], abs=5e-4)


def test_the_roof_is_products_and_attention_alone(data: Any) -> None:
    tokens, params = 65536, 32 * 218_112_000 + 128256 * 4096  # products of 8B: layers and head
    forward = 2 * 32 * 4096 * tokens
    seconds = 6 * params / 750e12 + forward / 617e12 + 2.5 * forward / 543e12
    assert data.roof(data.documents([tokens])) == pytest.approx(1 / seconds, rel=1e-3)
    for point in [*data.ours(), *data.peer()]:
        assert point.tokens_per_second < data.roof(data.documents([point.tokens]))


def test_a_mix_lies_between_its_rows(data: Any) -> None:
    short, mix, whole = data.mixes()
    assert 1 / mix.ours == pytest.approx(3 / 8 / short.ours + 5 / 8 / whole.ours, rel=1e-4)
    assert all(point.ours < data.roof(point.docs) for point in (short, mix, whole))


def test_published_utilization_is_what_the_source_has(data: Any) -> None:
    """Utilization by the same convention, computed by others: 34.8, 38.2, 40.6 and 41.8%."""
    system = "Ulysses, FlashAttention-3, offload, tiled MLP (UPipe paper)"
    found = [one.point.mfu for one in data.published() if one.system == system]
    assert found == pytest.approx([0.348, 0.382, 0.406, 0.418], abs=2e-3)


def test_simulated_ranks_appear_once_they_are_measured(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "read", lambda name: None)
    assert blocks.simulated({}).text.startswith("Not run yet")
    links = {"inside_gb_per_s": 360.0, "between_gb_per_s": 40.0}
    case: dict[str, Any] = {"ranks": 8, "length": 65536, "links": links, "layout": {"shard": 2, "ulysses": 4}}
    case["plan"] = {"peak_gib": 84.0, "compute_seconds": 3.0, "step_seconds": 3.1, "sent_bytes": {"weights": 7e10}}
    case["measured"] = {"counted_bytes": {"weights": 7.1e10}, "compute_seconds": 2.5, "step_seconds": 2.6}
    case["measured"]["tokens_per_second_per_gpu"] = 6300.0
    case["rank"] = {"memory_gib": 80.0}
    failed = {"plan": {}, "error": "not run, budget spent"}
    monkeypatch.setattr(blocks, "read", lambda name: {"cases": {"8b-64k-8": case, "70b-64k-8": failed}})
    [_, _, row, *rest] = blocks.simulated({}).text.splitlines()
    assert row == (
        "| 8B, 64K | 8 | shard 2, ulysses 4 | 84.0, 80.0 (1.05) | 3.00, 2.50 (1.20) | 70.0, 71.0 | 3.10, 2.60 | 6,300 |"
    )
    assert "70B" not in " ".join(rest) and "360 and 40 GB/s" in rest[-1]


def test_the_projection_is_what_plan_says_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    sys.modules.pop("projection", None)
    projection = importlib.import_module("projection")
    monkeypatch.setattr(projection, "GPUS", (8, 512))
    fresh = json.loads(json.dumps(projection.projected(["8b-512k-8"])))
    kept = json.loads((MEASURED / "projection.json").read_text())
    points = [point for point in kept["points"] if (point["model"], point["context_length"]) == ("8B", 524288)]
    assert fresh["points"] == [point for point in points if point["gpus"] in (8, 512)], "run benchmarks/projection.py"
    assert (fresh["assumptions"], fresh["origins"]) == (kept["assumptions"], kept["origins"])
    assert kept["origins"]["tokens_per_second"] == "modeled"
