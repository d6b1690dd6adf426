"""Stages on several ranks: what they publish, and checkpoints that any number of ranks goes on from."""

import json
from dataclasses import replace

import pytest
import torch

from factory import CPU, build_stage
from unspool.core.errors import ConfigError
from unspool.data.packing.store import open_rows
from unspool.training.checkpoint import resume as resume_module
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.loader import LEDGER
from unspool.training.metrics.logger import METRICS
from unspool.training.metrics.validation import SAMPLES as WRITTEN
from unspool.training.metrics.validation import VALIDATION
from unspool.training.parallel.apply import check_fit
from unspool.training.parallel.mesh import single_rank
from unspool.training.stage import run_stage

from .stages import NEXT, SAMPLES, SETTINGS, copied, gaps, goes_on, lines, train, weights

# Losses by their size; weights by themselves: an update is some 1e-3.
LOSS, WEIGHT = 1e-6, 2e-6
MADE = [
    "whole-4",
    "4-on-4",
    "4-on-mixed",
    "4-on-2",
    "whole-ulysses",
    "ulysses-on-ulysses",
    "ulysses-on-shard",
    "stopped",
]


def assert_as_one_rank(stages, name: str) -> None:
    out, wanted = stages / name / "one", stages / "whole-1" / "one"
    for file, key in ((METRICS, "loss"), (VALIDATION, "loss")):
        found = [(line["step"], line[key]) for line in lines(out, file)]
        right = [(line["step"], line[key]) for line in lines(wanted, file)]
        assert [step for step, _ in found] == [step for step, _ in right]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in right], rel=LOSS)
    found, right = weights(out), weights(wanted)
    assert found.keys() == right.keys()
    assert max(float((found[key] - right[key]).abs().max()) for key in right) < WEIGHT
    assert (out / LEDGER).read_bytes() == (wanted / LEDGER).read_bytes()
    assert gaps(out) == []
    for file in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (out / "model" / file).read_text() == (wanted / "model" / file).read_text()
    assert [path.name for path in out.parent.iterdir()] == ["one"], "something was left behind"


@pytest.mark.parametrize("name", MADE)
def test_a_stage_on_ranks_gives_what_one_rank_gives(stages, name):
    assert_as_one_rank(stages, name)


@pytest.mark.parametrize("start", ["cut-4", "cut-ulysses"])
def test_what_ranks_have_saved_one_rank_goes_on_from(stages, stage_materials, start):
    name = f"{start}-on-1"
    train(stage_materials, copied(stages / start / "one", stages / name / "one"), {})

    assert_as_one_rank(stages, name)


@pytest.mark.parametrize(
    ("name", "whole"),
    [("4-on-4", "whole-4"), ("ulysses-on-ulysses", "whole-ulysses"), ("loaded-whole", "whole-ulysses")],
)
def test_going_on_with_the_same_ranks_or_loading_whole_changes_no_bit(stages, name, whole):
    out, wanted = stages / name / "one", stages / whole / "one"

    for file in ("model/model.safetensors", OPTIMIZER, LEDGER):
        assert (out / file).read_bytes() == (wanted / file).read_bytes(), file


def test_it_was_a_checkpoint_that_ranks_wrote_their_parts_of(stages):
    (folder,) = (stages / "cut-4" / "one.work" / "checkpoints").glob("step-*")
    state = json.loads((folder / "state.json").read_text())

    assert state["facts"]["step"] == 2
    assert sorted(name[:11] for name in state["files"] if name.endswith(".safetensors")) == [
        f"shard-0000{rank}" for rank in (1, 2, 3, 4)
    ]


def test_without_what_was_saved_losses_would_be_others(stages, stage_materials, monkeypatch):
    """So the tests above would notice weights and moments that were not read."""
    monkeypatch.setattr(resume_module.Updater, "load_state_tensors", lambda self, saved: None)
    out = stages / "nothing-read" / "one"

    train(stage_materials, copied(stages / "cut-4" / "one", out), {})

    wanted = [line["loss"] for line in lines(stages / "whole-1" / "one", METRICS)]
    found = [line["loss"] for line in lines(out, METRICS)]
    assert found[-1] != pytest.approx(wanted[-1], rel=1e-4)


def test_a_stage_that_goes_on_from_another_gets_its_moments_and_weights(stages, stage_materials):
    """Also where the weights it starts from are finer than the model that was published."""
    train(goes_on(stage_materials, stages), stages / "next-1" / "one", {}, **NEXT)

    found, wanted = stages / "next-2" / "one", stages / "next-1" / "one"
    losses = [[line["loss"] for line in lines(out, METRICS)] for out in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS)
    assert all(
        torch.allclose(weights(found)[key], value, rtol=0, atol=WEIGHT) for key, value in weights(wanted).items()
    )
    # Had it begun with the published weights, or without moments, it would be far from there.
    alone = stages / "next-alone" / "one"
    train(replace(goes_on(stage_materials, stages), moments=None), alone, {}, **NEXT)
    assert [line["loss"] for line in lines(alone, METRICS)] != pytest.approx(losses[1], rel=1e-4)


def test_all_ranks_stop_after_the_step_in_which_one_was_asked_to(stages):
    found = torch.load(stages / "results-2", weights_only=False)

    assert found["stopped"] == 143
    assert [line["step"] for line in lines(stages / "stopped" / "one", METRICS)] == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_full_for_one_rank_costs_that_checkpoint_on_all(stages):
    found = torch.load(stages / "results-2", weights_only=False)["full disk"]

    assert found == {"said": ["No space left on device"] * 2, "left": ["step-000001"]}


def test_ranks_write_the_samples_that_one_rank_writes(stages, stage_materials, tmp_path):
    train(stage_materials, tmp_path / "one", {}, **SAMPLES)

    assert lines(stages / "samples-2" / "one", WRITTEN) == lines(tmp_path / "one", WRITTEN)


def test_another_layout_does_not_make_a_finished_stage_anew(stages, stage_materials, capsys):
    out = stages / "whole-4" / "one"

    train(stage_materials, out, {})

    assert "stage one: up to date" in capsys.readouterr().err


# Refused before anything is loaded


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"ulysses": 2}}, "ulysses 2 = 2 ranks do not divide the 1 ranks of this run"),
        ({"parallel": {"shard": 4}}, "shard=4 times the other axes is 4 ranks, but this run has 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_what_would(stage_materials, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        run_stage(
            build_stage(**SETTINGS | changes),
            stage_materials,
            tmp_path / "one",
            seed=0,
            device=CPU,
            ranks=single_rank(CPU),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "words"),
    [
        ({}, 8, "a step of 4 micro-batches .* does not divide among replicate × shard = 8"),
        ({"parallel": {"ulysses": 8}}, 8, "ulysses=8 does not fit 4 query and 2 KV heads"),
        ({"parallel": {"ring": 2}}, 2, "does not support document masks"),
        # Full, but two short rows make a context.
        ({"parallel": {"ring": 2}, "attention": "full"}, 2, "does not support document masks"),
        ({"optimizer": {"weights": "bf16"}}, 2, "optimizer.weights bf16 is not supported on several devices"),
        ({"parallel": {"offload": True}} | SAMPLES, 2, "samples cannot be combined with parallel.offload"),
    ],
)
def test_a_stage_that_does_not_fit_its_ranks_is_refused(stage_materials, changes, world_size, words):
    rows = {name: open_rows(folder) for name, folder in stage_materials.datasets.items()}

    with pytest.raises(ConfigError, match=words):
        check_fit(build_stage(**SETTINGS | changes), stage_materials.model, rows, world_size=world_size)


def test_a_ring_takes_rows_that_are_one_document_each(stage_materials):
    rows = {"long": open_rows(stage_materials.datasets["long"])}
    stage = build_stage(**SETTINGS | {"mix": {"long": 1.0}, "attention": "full", "parallel": {"ring": 2}})

    assert check_fit(stage, stage_materials.model, rows, world_size=2).ring == 2
