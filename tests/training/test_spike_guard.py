"""A step that goes wrong is stopped or skipped before it changes a weight, the same way however a run is resumed."""

import json
import math
from pathlib import Path

import pytest

from factory import build_stage, in_child
from unspool.core.errors import UnspoolError
from unspool.data.mixture import Mix
from unspool.training import loop as loop_module
from unspool.training import step as forward_module
from unspool.training.config import GuardConfig, StageConfig
from unspool.training.loader import LEDGER, read_ledger
from unspool.training.metrics.logger import METRICS
from unspool.training.schedule import SpikeGuard

from .stage_runs import STAGE, assert_same_result, kill_after_step, metrics, run

SKIP = GuardConfig(nan="skip", spike="skip", window=3)


def fed(config: GuardConfig, losses: list[float], norm: float = 1.0) -> SpikeGuard:
    guard = SpikeGuard(config)
    for loss in losses:
        assert guard.record(loss, norm, guard.find_problem(loss, norm))
    return guard


# Judging


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (2.9, 1.0, None),
        (6.1, 1.0, "its loss of 6.1 is above 2 × 3, the median of the last 3 steps"),
        (3.0, 10.1, "its gradient norm of 10.1 is above 10 × 1"),
        (math.nan, 1.0, "the loss or gradient is not finite"),
        (3.0, math.inf, "the loss or gradient is not finite"),
    ],
)
def test_what_is_wrong_is_said(loss, norm, said):
    wrong = fed(SKIP, [4.0, 3.0, 2.0]).find_problem(loss, norm)
    assert wrong is None if said is None else wrong is not None and wrong.startswith(said)


def test_nothing_is_a_spike_before_the_window_is_full_or_when_it_is_off():
    assert fed(SKIP, [3.0, 3.0]).find_problem(100.0, 1.0) is None
    assert fed(GuardConfig(window=2), [3.0, 3.0, 3.0]).find_problem(100.0, 1e9) is None


def test_a_skipped_step_is_not_remembered_as_usual():
    guard = fed(SKIP, [3.0, 3.0, 3.0])
    before = guard.state["losses"]
    assert guard.record(50.0, 1.0, guard.find_problem(50.0, 1.0))
    assert guard.state["losses"] == before


def test_policies_are_for_their_own_kind():
    guard = fed(GuardConfig(nan="stop", spike="skip", window=2), [3.0, 3.0])
    assert guard.record(50.0, 1.0, "spike")
    assert not guard.record(math.nan, 1.0, "not a number")


def test_skipping_without_end_stops():
    guard = SpikeGuard(GuardConfig(nan="skip", most_skips=3))
    assert [guard.record(math.nan, 1.0, "x") for _ in range(3)] == [True, True, False]
    guard = SpikeGuard(GuardConfig(nan="skip", most_skips=3))
    assert [guard.record(loss, 1.0, guard.find_problem(loss, 1.0)) for loss in (math.nan, math.nan, 1.0, math.nan)][-1]


def test_what_it_remembers_survives_being_written_down():
    guard = fed(SKIP, [0.1 + 0.2, 3.0, 1 / 3])
    again = SpikeGuard(SKIP)
    again.restore(json.loads(json.dumps(guard.state)))
    assert again.state == guard.state
    assert again.max_norm == guard.max_norm


def test_a_step_inside_the_backward_pass_cannot_be_skipped():
    with pytest.raises(ValueError, match=r"guard cannot skip a step with optimizer\.step in-backward"):
        build_stage(micro_batch_tokens=64, optimizer={"step": "in-backward"}, guard={"nan": "skip"})


# In a stage


def going_wrong(monkeypatch, *, step: int, factor: float) -> None:
    """The loss of one step is `factor` times what it should be, and its gradient with it."""
    true_step, true_loss, true_load = loop_module.train_step, forward_module.summed_loss, loop_module.load_steps
    at = 0

    def load_steps(*args, first, **kwargs):
        nonlocal at
        at = first - 1
        return true_load(*args, first=first, **kwargs)

    def train_step(*args, **kwargs):
        nonlocal at
        at += 1
        return true_step(*args, **kwargs)

    def summed_loss(*args, **kwargs):
        return tuple(part * (factor if at == step else 1.0) for part in true_loss(*args, **kwargs))

    monkeypatch.setattr(loop_module, "load_steps", load_steps)
    monkeypatch.setattr(loop_module, "train_step", train_step)
    monkeypatch.setattr(forward_module, "summed_loss", summed_loss)


def guarded(**guard) -> StageConfig:
    return STAGE.model_copy(update={"guard": GuardConfig(**guard), "checkpoint_every": 1})


@pytest.mark.parametrize("factor", [math.nan, 20.0])
def test_a_skipped_step_changes_nothing_is_written_down_and_resumes_exactly(factor, materials, tmp_path, monkeypatch):
    stage = guarded(nan="skip", spike="skip", window=3)
    going_wrong(monkeypatch, step=5, factor=factor)
    whole, out = tmp_path / "whole" / "one", tmp_path / "killed" / "one"
    run(materials, whole, stage)
    for number in (4, 5):
        with monkeypatch.context() as patched:
            kill_after_step(number)(patched.setattr)
            in_child(lambda: run(materials, out, stage))
    run(materials, out, stage)

    assert_same_result(out, whole)
    lines = metrics(whole)
    assert [line["step"] for line in lines if line["skipped"]] == [5]
    assert lines[4]["wrong"]
    entries = read_ledger(whole / LEDGER)
    assert [entry["step"] for entry in entries if "skipped" in entry] == [5]
    assert len(entries) == 6


def test_a_skipped_step_leaves_weights_and_moments_alone(materials, tmp_path, monkeypatch):
    """The last step is skipped: the stage ends with what it had before."""
    seen = {}

    def watched(model, updater, work, **options):
        before = {name: tensor.clone() for name, tensor in updater.state_tensors().items() if "norm_before" not in name}
        result = true_step(model, updater, work, **options)
        after = updater.state_tensors()
        seen[len(seen) + 1] = all(bool((after[name] == tensor).all()) for name, tensor in before.items())
        return result

    going_wrong(monkeypatch, step=6, factor=20.0)
    true_step = loop_module.train_step
    monkeypatch.setattr(loop_module, "train_step", watched)
    run(materials, tmp_path / "one", guarded(spike="skip", window=3))

    assert seen == {1: False, 2: False, 3: False, 4: False, 5: False, 6: True}


def test_a_spike_stops_with_its_rows_and_can_be_skipped_afterwards(materials, tmp_path, monkeypatch, capsys):
    going_wrong(monkeypatch, step=5, factor=20.0)
    out: Path = tmp_path / "one"
    with pytest.raises(UnspoolError) as error:
        run(materials, out, guarded(spike="stop", window=3))
    sentence = str(error.value)
    assert sentence.startswith("stage one: step 5: its loss of ")
    rows = [f"{name}[{index}]" for name, index in _rows_of(step=5)]
    assert all(row in sentence for row in rows)
    assert len((tmp_path / "one.work" / METRICS).read_text().splitlines()) == 4

    # Another policy goes on with the same work.
    run(materials, out, guarded(spike="skip", window=3))
    assert "resuming after step 4" in capsys.readouterr().err
    assert [line["step"] for line in metrics(out) if line["skipped"]] == [5]


def _rows_of(step: int) -> list[tuple[str, int]]:
    mix = Mix(STAGE.mix, {"long": 7, "short": 5}, {"long": 32, "short": 16}, 32, 0)
    return [pick for slot in (2 * step - 2, 2 * step - 1) for pick in mix.slot(slot)]


def test_a_guard_that_is_never_needed_changes_no_bit(materials, never_killed, tmp_path):
    run(materials, tmp_path / "one", STAGE.model_copy(update={"guard": SKIP}))
    assert_same_result(tmp_path / "one", never_killed)
