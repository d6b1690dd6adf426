"""benchmarks/simulated_ranks.py: bytes that one of many simulated ranks sends, and a whole run on tiny shapes."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from factory import build_model, build_stage, random_row
from planning.tracked import shape_of
from unspool.models.memory.policy import MemoryPolicy
from unspool.planning.cost import FULL, HALF, kv_slices, sent
from unspool.training.batch import build_batch, split_batch
from unspool.training.optim.updater import build_updater
from unspool.training.parallel.apply import parallelize
from unspool.training.parallel.config import ParallelConfig, settle_layout
from unspool.training.parallel.mesh import build_mesh, rank_coords
from unspool.training.step import batch_loss

BEFORE = dist.all_reduce
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROW = 64
POLICIES = {
    "none": MemoryPolicy(),
    "keep-attention": MemoryPolicy(activation_checkpointing="keep-attention"),
    "keep-products": MemoryPolicy(activation_checkpointing="keep-attention", keep_products=1),
    "full": MemoryPolicy(activation_checkpointing="full"),
}


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("collectives")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("simulated_ranks")


def one_step(world: int, policy: MemoryPolicy = POLICIES["none"], **parallel: int) -> Any:
    """Run a step of rank 0 of `world`; return the model."""
    config = ParallelConfig(**parallel)
    mesh = build_mesh(config, world, "cpu")
    coords = rank_coords(mesh)
    model = parallelize(build_model().train(), mesh, config, memory=policy)
    updater = build_updater(build_stage(), model)
    batch = build_batch([random_row((ROW,), 0)], attention="full")
    part = split_batch(batch, coords.sequence_rank, coords.sequence_ranks, ring=coords.ring)
    updater.begin(1e-3)
    loss, _ = batch_loss(model, part)
    loss.backward()
    assert updater.finish(is_good=True) > 0, "gradients are finite and not zero"
    return model


def padded(parameter: torch.Tensor, ranks: int) -> int:
    """Elements of a parameter whose rows are divided among ranks, the last with empty rows."""
    rows, rest = parameter.shape[0], parameter.numel() // parameter.shape[0]
    return -(-rows // ranks) * ranks * rest


# FSDP


@pytest.mark.parametrize("world", [8, 64])
def test_layers_are_gathered_twice_the_rest_once_and_every_gradient_is_scattered(collectives: Any, world: int) -> None:
    plain = build_model()
    with collectives.simulated_ranks(world) as counts:
        one_step(world)
    sizes = {name: padded(parameter, world) for name, parameter in plain.named_parameters()}
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    others = (world - 1) / world
    assert counts.total("all-gather") == 4 * (sum(sizes.values()) + in_layers) * others
    assert counts.total("reduce-scatter") == 4 * sum(sizes.values()) * others
    assert counts.total("all-to-all") == counts.total("send") == 0


def test_plan_counts_the_weights_that_are_sent(collectives: Any) -> None:
    world, plain = 8, build_model()
    with collectives.simulated_ranks(world) as counts:
        one_step(world)
    shape, layout = shape_of(plain), settle_layout(ParallelConfig(), world)
    # A CPU gathers fp32; rows of this model do not all divide by 8, so that a few empty ones are sent.
    gathered = counts.total("all-gather") * HALF / FULL + counts.total("reduce-scatter")
    assert sent(shape, layout, ROW).weights == pytest.approx(gathered, rel=0.02)
    before = (2 * HALF + FULL) * shape.params * 7 / 8
    assert before != pytest.approx(gathered, rel=0.02), "embedding and head gathered twice"


# Ulysses


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("world", "degree"), [(8, 2), (64, 4)])
def test_heads_are_exchanged_twice_per_layer_and_pass(collectives: Any, name: str, world: int, degree: int) -> None:
    with collectives.simulated_ranks(world) as counts:
        model = one_step(world, POLICIES[name], ulysses=degree)
    shape, passes = shape_of(model), 2 if name == "none" else 3
    assert counts.calls["all-to-all", degree] == 2 * shape.num_layers * passes, "four a layer without recomputation"
    tokens, heads = ROW // degree, shape.num_heads + kv_slices(shape, degree)
    once = 2 * heads * shape.head_dim * tokens * 4 * (degree - 1) / degree
    assert counts.total("all-to-all") == once * shape.num_layers * passes
    layout = settle_layout(ParallelConfig(ulysses=degree), world)
    wanted = sent(shape, layout, ROW, recomputed=name != "none").heads
    assert wanted == counts.total("all-to-all") * HALF / FULL


# Ring


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("ring", [2, 4])
def test_keys_pass_every_other_rank_and_their_gradients_return(collectives: Any, name: str, ring: int) -> None:
    with collectives.simulated_ranks(8) as counts:
        model = one_step(8, POLICIES[name], ring=ring)
    shape, passes = shape_of(model), 2 if name == "none" else 3
    assert counts.calls["send", ring] == shape.num_layers * (passes * (ring - 1) + ring)
    keys = 2 * shape.num_kv_heads * shape.head_dim * ROW // ring * shape.num_layers
    assert counts.total("send") == keys * 4 * (passes * (ring - 1) + ring)
    layout = settle_layout(ParallelConfig(ring=ring), 8)
    in_bf16 = keys * (HALF * passes * (ring - 1) + FULL * ring)
    assert sent(shape, layout, ROW, recomputed=name != "none").keys == in_bf16


# The counts themselves


class Dispatched(TorchDispatchMode):
    """Counts the collectives that reach a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls[func._opname] += 1
        return func(*args, **kwargs or {})


def test_no_collective_reaches_the_group_uncounted(collectives: Any) -> None:
    with collectives.simulated_ranks(8) as counts:
        with Dispatched() as passed:
            one_step(8, ulysses=2, ring=2)
        assert not passed.calls
        assert {kind for kind, _ in counts.calls} == set(collectives.FUNCTIONS)
        dist.all_reduce = BEFORE  # as an operation that the benchmark does not know
        with Dispatched() as passed:
            one_step(8)
        assert set(passed.calls) == {"allreduce_"}


def test_the_group_is_gone_afterwards(collectives: Any) -> None:
    with collectives.simulated_ranks(8):
        assert dist.all_reduce is not BEFORE
    assert dist.all_reduce is BEFORE
    assert not dist.is_initialized()


def test_a_rank_gets_its_own_values_instead_of_none(collectives: Any) -> None:
    with collectives.simulated_ranks(4):
        gathered, reduced, received = torch.full((8,), -1.0), torch.full((2,), -1.0), torch.full((2,), -1.0)
        gathered[:2] = torch.tensor([1.0, 2.0])
        dist.all_gather_into_tensor(gathered, gathered[:2])
        dist.reduce_scatter_tensor(reduced, torch.arange(8.0))
        [message, _] = dist.batch_isend_irecv([dist.P2POp(dist.isend, reduced, 1), dist.P2POp(dist.irecv, received, 3)])
        assert message.wait()
    assert gathered.tolist() == [1.0, 2.0] * 4
    assert reduced.tolist() == received.tolist() == [0.0, 1.0]


# The benchmark


def result(error: str | None = None) -> dict[str, Any]:
    planned = {"peak_gib": 84.0, "compute_seconds": 3.0, "step_seconds": 3.1, "sent_bytes": {"weights": 7e10}}
    found: dict[str, Any] = {"layout": {"shard": 2, "ulysses": 4, "ring": 1}, "plan": planned, "expected_seconds": 52}
    if error is not None:
        return found | {"error": error}
    ratios = {"memory": 0.85, "compute": 1.02}
    measured = {"counted_bytes": {"weights": 7e10}, "compute_seconds": 2.9, "step_seconds": 3.0}
    measured |= {"tokens_per_second_per_gpu": 5400.0, "predicted_to_measured": ratios}
    return found | {"measured": measured, "rank": {"memory_gib": 98.8, "updated": True}, "seconds": 50.0}


def test_a_case_that_was_not_run_keeps_its_result(benchmark: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    benchmark.write(path, {"8b-64k-8": result(), "70b-64k-8": result("not run, budget spent")})
    benchmark.write(path, {"8b-64k-8": result("ended with code -9")})
    cases = json.loads(path.read_text())["cases"]
    assert "measured" in cases["8b-64k-8"]
    assert cases["70b-64k-8"]["error"] == "not run, budget spent"


def test_a_missed_goal_and_missing_numbers_are_shown(benchmark: Any) -> None:
    lines = benchmark.table({"8b-64k-8": result(), "70b-64k-8": result("not run, budget spent")}).splitlines()
    assert lines[2].startswith("| 8b-64k-8 | shard 2, ulysses 4 | 84.0, 98.8 | 3.00, 2.90 | 70.00, 70.00 |")
    assert "84.0, –" in lines[3] and "about 52" in lines[3]
    assert "memory MISSES the goal" in benchmark.line("8b-64k-8", result())


def test_a_step_is_compute_plus_what_bytes_need_beyond_it(benchmark: Any, tmp_path: Path) -> None:
    case = benchmark.SIMULATIONS["8b-64k-512"]
    found = benchmark.predict(case, tmp_path, small=False, link=100, network=10)
    layout = found.estimate.layout
    assert (layout.shard, layout.ulysses) == (64, 8)
    sent = found.sent_bytes
    # Weights of 512 ranks over eight network cards of 10 GB/s each; heads inside a machine over 100 GB/s.
    assert found.step_seconds(0.1, sent) == pytest.approx(sent.weights / 80e9 + sent.heads / 100e9)
    assert found.step_seconds(100.0, sent) == pytest.approx(100 + sent.heads / 100e9)
    assert found.estimate.seconds.step == pytest.approx(found.step_seconds(found.compute_seconds, sent))


def test_whole_run_on_tiny_shapes(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--small", "--out", str(out), "--cases", "8b-512k-512"])
    benchmark.main()
    found = json.loads(out.read_text())["cases"]["8b-512k-512"]
    assert found["rank"]["updated"] and found["rank"]["sharded_load"]
    assert found["layout"] == {"replicate": 1, "shard": 8, "ring": 8, "ulysses": 8}
    assert {(one["kind"], one["ranks"]) for one in found["rank"]["collectives"]} == {
        *(("all-gather", 512), ("reduce-scatter", 512), ("all-reduce", 512), ("all-to-all", 8), ("send", 8)),
    }
    # A CPU sends fp32 where a GPU sends bf16.
    assert found["measured"]["predicted_to_measured"]["heads_bytes"] == 0.5
    assert found["links"]["between_gb_per_s"] == 40


def test_no_case_is_started_that_the_budget_cannot_hold(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "predict", lambda *_, **__: SimpleNamespace(as_plain=result))
    monkeypatch.setattr(benchmark, "simulate", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(sys, "argv", ["x", "--small", "--budget", "1", "--cases", "8b-64k-8"])
    benchmark.main()
    assert "8b-64k-8: not run, it takes about 5 s and 1 s are left" in capsys.readouterr().out


def test_a_case_that_ends_with_an_error_does_not_end_the_others(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "predict", lambda *_, **__: SimpleNamespace(as_plain=result))
    monkeypatch.setattr(benchmark, "simulate", lambda *_: -9)
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--small", "--out", str(out), "--cases", "8b-64k-8", "70b-64k-8"])
    benchmark.main()
    errors = [found["error"] for found in json.loads(out.read_text())["cases"].values()]
    assert errors == ["ended with code -9"] * 2
