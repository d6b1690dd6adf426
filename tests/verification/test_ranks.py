"""`verify --ranks`: what it compares, and the mistakes of training on ranks that it is there for."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import unspool.training.loader
import unspool.training.parallel.apply
import unspool.training.parallel.fsdp
import unspool.training.step
from training.parallel.ranks import run_ranks
from unspool.cli.main import build_app
from unspool.data.packing.row import IGNORE
from unspool.training.batch import Batch, split_batch
from unspool.training.parallel.mesh import sum_over_ranks
from unspool.verification.rank_layouts import RankProcesses, compute_layouts, possible_layouts, rank_check
from unspool.verification.run import run_check


class Forked:
    """Ranks that are copies of this process, and so have what a test has broken in it."""

    def __init__(self, folder: Path, world_size: int, layouts: Callable[[str], bool]) -> None:
        self._folder, self.world_size, self._layouts = folder, world_size, layouts

    def compute(self, request: dict[str, Any]) -> dict[str, Any]:
        chosen = [layout for layout in request["layouts"] if self._layouts(layout)]
        assert chosen

        def work(rank: int) -> None:
            found = compute_layouts(request | {"layouts": chosen}, world_size=self.world_size)
            if rank == 0:
                torch.save(found, self._folder / "answer")

        (self._folder / "store").unlink(missing_ok=True)
        run_ranks(work, world_size=self.world_size, store=self._folder / "store")
        return torch.load(self._folder / "answer", weights_only=True)


@pytest.fixture
def failed(case, tmp_path) -> Callable[..., list[str]]:
    """The quantities that do not come out right on 2 ranks, in layouts with this `ulysses` on rows of this step."""

    def check(ulysses: int, step: str = "several", family: str = "llama") -> list[str]:
        ranks = Forked(tmp_path, 2, lambda one: (one["ulysses"], one["step"], one["replicate"]) == (ulysses, step, 1))
        found = run_check(rank_check(ranks), case(family))
        assert found and all(result.error is not None for result in found), found
        return [result.quantity for result in found if result.status == "failed"]

    return check


def test_correct_code_passes_all_checks(failed):
    assert failed(ulysses=2) == []


def test_a_loss_averaged_by_rank(failed, monkeypatch):
    monkeypatch.setattr(
        unspool.training.step,
        "sum_over_ranks",
        lambda values, mesh: [values[0] * mesh.size()] if len(values) == 1 else sum_over_ranks(values, mesh),
    )
    assert "shard 2 loss" in failed(ulysses=1)


def test_labels_shifted_after_the_split(failed, monkeypatch):
    def late(batch: Batch, rank: int, degree: int, *, ring: int) -> Batch:
        part = split_batch(batch, rank, degree, ring=ring)
        labels = part.shift_labels.clone()
        labels[-1] = IGNORE
        return replace(part, shift_labels=labels, num_valid=(int((labels != IGNORE).sum()),))

    monkeypatch.setattr(unspool.training.loader, "split_batch", late)
    assert "ulysses 2, single documents loss" in failed(ulysses=2, step="single")


def test_documents_cut_at_rank_borders(failed, monkeypatch):
    def cut(batch: Batch, rank: int, degree: int, *, ring: int) -> Batch:
        part = split_batch(batch, rank, degree, ring=ring)
        first, last = rank * len(part.tokens), (rank + 1) * len(part.tokens)
        ends = torch.tensor(part.doc_lens).cumsum(0).clamp(first, last)
        lens = torch.diff(ends, prepend=torch.tensor([first]))
        return replace(part, doc_lens=tuple(lens[lens > 0].tolist()))

    monkeypatch.setattr(unspool.training.loader, "split_batch", cut)
    monkeypatch.setattr(unspool.training.parallel.apply, "apply_sequence", lambda model, mesh: None)
    assert "ulysses 2 loss" in failed(ulysses=2)


def test_a_gradient_that_counts_twice(failed, monkeypatch):
    def twice(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(0.5)
                module.set_force_sum_reduction_for_comms(True)

    monkeypatch.setattr(unspool.training.parallel.fsdp, "sum_gradients", twice)
    assert failed(ulysses=2) == ["ulysses 2 gradient"], "the loss knows nothing of it"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "llama+dynamic"])
def test_frequencies_chosen_by_the_positions_of_one_rank(failed, monkeypatch, family):
    assert failed(ulysses=2, step="single", family=family) == []
    monkeypatch.setattr(Batch, "model_inputs", property(_without_spans))
    assert "ulysses 2, single documents loss" in failed(ulysses=2, step="single", family=family)


def _without_spans(batch: Batch) -> dict[str, Any]:
    lengths = batch.position_ids.max() + 1
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "doc_lens": batch.doc_lens,
        "rope_spans": ((len(batch.tokens), int(lengths)),),
    }


def test_layouts_are_those_that_the_heads_allow():
    def names(world_size: int, *heads: int) -> list[str]:
        return [layout.name for layout in possible_layouts(world_size, *heads, 64)]

    assert names(2, 4, 2) == [
        "shard 2",
        "ulysses 2",
        "replicate 2",
        "shard 2, single documents",
        "ulysses 2, single documents",
        "ring 2, single documents",
        "replicate 2, single documents",
    ]
    assert {"shard 2 × ulysses 2", "replicate 2 × shard 2", "ulysses 2 × ring 2, single documents", "ulysses 4"} <= set(
        names(4, 4, 2)
    )
    assert not any("ulysses" in name for name in names(2, 9, 3))


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_others_are_started_for_the_next_request():
    request = {
        "name": "x",
        "ref": "./nowhere",
        "device": "cpu",
        "seed": 0,
        "length": 64,
        "layouts": [{"step": "several", "replicate": 1, "shard": 1, "ring": 1, "ulysses": 2}],
    }
    with RankProcesses(2) as ranks:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"rank [01]: .*nowhere"):
                ranks.compute(request)


@pytest.mark.slow
def test_the_command_gives_a_line_for_each_layout():
    done = CliRunner().invoke(
        build_app(), ["verify", "--device", "cpu", "--model", "llama", "--only", "ranks", "--ranks", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {one["check"] for one in found} == {"ranks"}
    assert {one["promise"] for one in found} == {2}
    assert {"shard 2 loss", "ulysses 2 gradient", "ring 2, single documents gradient"} <= {
        one["quantity"] for one in found
    }


def test_the_signal_that_killed_a_rank_is_reported_with_its_last_output():
    with RankProcesses(1) as ranks:
        ranks._start("cpu")
        ranks._children[0].send_signal(signal.SIGSEGV)
        ranks._children[0].wait()
        (ranks._folder / "errors-0").write_text("UserWarning: of something else\n")
        with pytest.raises(RuntimeError, match="rank 0 was killed by SIGSEGV; its last output: UserWarning"):
            ranks.compute({"device": "cpu"})


@pytest.mark.gpu
def test_two_ranks_that_share_a_gpu_give_the_result_of_one():
    done = CliRunner().invoke(
        build_app(), ["verify", "--device", "cuda", "--model", "llama", "--only", "ranks", "--ranks", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert {"shard 2 loss", "ulysses 2 loss", "ring 2, single documents loss"} <= {
        one["quantity"] for one in json.loads(done.stdout)
    }
