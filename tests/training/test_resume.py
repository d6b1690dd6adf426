"""Everything that the steps to come depend on is there again after resuming: also random numbers."""

import json
import random

import numpy as np
import pytest
import torch

from factory import in_child
from unspool.core.errors import UnspoolError
from unspool.training import loop as loop_module
from unspool.training.checkpoint import resume as resume_module
from unspool.training.checkpoint.resume import read_random_state, seed_all, set_random_state
from unspool.training.checkpoint.save import checkpoints

from .stage_runs import assert_same_result, kill_after_step, metrics, run


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(())), random.gauss(0, 1), np.random.normal()]


def test_a_state_that_was_written_down_goes_on_where_it_was():
    seed_all(3, "one")
    draw()
    state = json.loads(json.dumps(read_random_state()))
    wanted = [draw() for _ in range(3)]
    seed_all(4, "one")
    assert [draw() for _ in range(3)] != wanted

    set_random_state(state)

    assert [draw() for _ in range(3)] == wanted


def test_seeds_and_stages_have_numbers_of_their_own():
    drawn = []
    for seed, stage in ((0, "one"), (0, "one"), (1, "one"), (0, "two")):
        seed_all(seed, stage)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn}) == 3


def by_chance(monkeypatch) -> None:
    """Steps that depend on every global generator, as under dropout."""
    true_rate = loop_module.learning_rate
    monkeypatch.setattr(
        loop_module, "learning_rate", lambda stage, step: true_rate(stage, step) * (1 + sum(draw()[:3]))
    )


def kill_and_resume(materials, out, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        assert in_child(lambda: run(materials, out)) == -9
    draw()
    run(materials, out)


def test_steps_that_depend_on_chance_are_the_same_after_resuming(materials, tmp_path, monkeypatch):
    by_chance(monkeypatch)
    run(materials, tmp_path / "whole" / "one")

    kill_and_resume(materials, tmp_path / "killed" / "one", monkeypatch)

    assert_same_result(tmp_path / "killed" / "one", tmp_path / "whole" / "one")
    assert len({line["lr"] for line in metrics(tmp_path / "whole" / "one")}) == 6


def test_without_random_states_they_would_not_be(materials, tmp_path, monkeypatch):
    by_chance(monkeypatch)
    run(materials, tmp_path / "whole" / "one")
    monkeypatch.setattr(resume_module, "set_random_state", lambda state: None)

    kill_and_resume(materials, tmp_path / "killed" / "one", monkeypatch)

    assert metrics(tmp_path / "killed" / "one") != metrics(tmp_path / "whole" / "one")


@pytest.mark.parametrize("damage", ["one", "all"])
def test_a_stage_with_damaged_checkpoints_goes_back_further_and_ends_the_same(
    damage, materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(5)(patched.setattr)
        in_child(lambda: run(materials, out))
    found = checkpoints(tmp_path / "one.work" / "checkpoints")
    assert [path.name for path in found] == ["step-000002", "step-000004"]
    for path in found if damage == "all" else found[-1:]:
        (file,) = path.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])

    run(materials, out)

    said = capsys.readouterr().err
    assert "checkpoint step-000004 is damaged (" in said
    assert ("resuming after step 2" in said) == (damage == "one")
    assert_same_result(out, never_killed)


# The last step is saved unless those since the last checkpoint are cheap to repeat.
@pytest.mark.parametrize(("cheap_s", "saved"), [(0.0, "step-000006"), (300.0, "step-000004")])
def test_a_result_that_cannot_be_written_is_told_in_a_sentence_and_costs_cheap_steps_at_most(
    cheap_s, saved, materials, never_killed, tmp_path, monkeypatch
):
    monkeypatch.setattr("unspool.training.loop.CHEAP_S", cheap_s)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        patched.setattr("unspool.training.stage.save_stage_state", full)
        with pytest.raises(UnspoolError) as error:
            run(materials, out)
    assert str(error.value) == (
        "stage one: cannot write its result (No space left on device); free some space and rerun the same "
        f"command, which resumes from {saved}."
    )

    run(materials, out)
    assert_same_result(out, never_killed)
