"""On a GPU a step is logged while the next one computes, and the device decides about its update.

A CPU computes at once, so that both ways can be compared bit for bit here.
"""

import json
import math

import pytest
import torch

from factory import in_child
from unspool.core.errors import UnspoolError
from unspool.training import loop as loop_module
from unspool.training.config import GuardConfig
from unspool.training.loader import build_step
from unspool.training.metrics.logger import METRICS
from unspool.training.stage import run_stage
from unspool.training.step import start_step

from .optimizer_runs import MODES, ROWS, assert_same, copied, mode_name, start, take
from .stage_runs import STAGE, assert_same_result, metrics, run
from .test_spike_guard import going_wrong

AFTER = [mode for mode in MODES if mode["step"] == "after"]


@pytest.fixture
def late(monkeypatch) -> None:
    monkeypatch.setattr(loop_module, "LOGGED_LATE", ("cpu", "cuda"))


def take_late(model, updater, stage, steps: range) -> list:
    waiting, results = [], []

    def settle() -> None:
        results.extend(found() for found in waiting)
        waiting.clear()

    for step in steps:
        batches = build_step(stage, ROWS, [[("long", step % 4)]])
        waiting.append(start_step(model, updater, batches, lr=stage.lr, before_update=settle))
        assert len(waiting) == 1
    settle()
    return results


@pytest.mark.parametrize("mode", AFTER, ids=mode_name)
@pytest.mark.parametrize("max_grad_norm", [0.01, 1e9])
def test_steps_that_nobody_waits_for_are_the_same(mode, max_grad_norm):
    model, updater, stage = start(mode, max_grad_norm=max_grad_norm)
    again, updater_again, _ = start(mode, max_grad_norm=max_grad_norm)

    assert take(model, updater, stage, range(4)) == take_late(again, updater_again, stage, range(4))
    assert_same(updater_again.state_tensors(), updater.state_tensors())


@pytest.mark.parametrize("mode", AFTER, ids=mode_name)
def test_a_step_that_is_not_finite_changes_and_counts_nothing(mode, monkeypatch):
    model, updater, stage = start(mode)
    take_late(model, updater, stage, range(2))
    before = copied(updater.state_tensors())
    torch.nn.init.constant_(model.lm_head.weight, math.nan)  # the updater has its own weights, or these

    (result,) = take_late(model, updater, stage, range(2, 3))

    assert not result.finite
    after = updater.state_tensors()
    assert_same(
        {name: tensor for name, tensor in after.items() if "lm_head" not in name},
        {name: tensor for name, tensor in before.items() if "lm_head" not in name},
    )


def test_a_stage_ends_with_the_same_bits_and_lines(late, materials, never_killed, tmp_path, monkeypatch):
    calls = []
    true_step = loop_module.start_step
    monkeypatch.setattr(loop_module, "start_step", lambda *args, **more: (calls.append(1), true_step(*args, **more))[1])
    run(materials, tmp_path / "one")
    assert_same_result(tmp_path / "one", never_killed)
    assert len(calls) == 6


def test_a_step_is_logged_before_the_next_update_and_not_before_the_next_forward_pass(
    late, materials, tmp_path, monkeypatch
):
    seen = []
    true_step = loop_module.start_step
    lines = lambda: len((tmp_path / "one.work" / METRICS).read_text().splitlines())  # noqa: E731

    def watched(model, updater, batches, *, lr, before_update):
        at_begin = lines()

        def settle() -> None:
            before_update()
            seen.append((at_begin, lines()))

        return true_step(model, updater, batches, lr=lr, before_update=settle)

    monkeypatch.setattr(loop_module, "start_step", watched)
    run(materials, tmp_path / "one", STAGE.model_copy(update={"checkpoint_every": 4}))
    # Step 4 is saved, so its line is there at once.
    assert seen == [(0, 0), (0, 1), (1, 2), (2, 3), (4, 4), (4, 5)]


@pytest.mark.parametrize("every", [1, 6])
def test_a_loss_that_is_not_finite_stops_before_any_later_update_or_checkpoint(
    every, late, materials, tmp_path, monkeypatch
):
    going_wrong_late(monkeypatch, step=3)
    stage = STAGE.model_copy(update={"checkpoint_every": every})
    with pytest.raises(UnspoolError) as error:
        run(materials, tmp_path / "one", stage)
    assert str(error.value).startswith("stage one: step 3: the loss or gradient is not finite (rows ")
    assert "it changed no weight" in str(error.value)
    work = tmp_path / "one.work"
    assert len((work / METRICS).read_text().splitlines()) == 2
    saved = [path.name for path in (work / "checkpoints").glob("step-*")]
    assert sorted(saved) == (["step-000001", "step-000002"] if every == 1 else [])


def going_wrong_late(monkeypatch, *, step: int) -> None:
    going_wrong(monkeypatch, step=step, factor=math.nan)
    counted = loop_module.train_step  # counts steps, and trains them
    true_step = loop_module.start_step
    cells = dict(zip(counted.__code__.co_freevars, counted.__closure__, strict=True))

    def start_counted(*args, **more):
        cells["at"].cell_contents += 1
        return true_step(*args, **more)

    monkeypatch.setattr(loop_module, "start_step", start_counted)


def test_a_skipped_step_is_skipped_as_when_it_is_waited_for(late, materials, tmp_path, monkeypatch):
    stage = STAGE.model_copy(update={"guard": GuardConfig(nan="skip"), "checkpoint_every": 6})
    with monkeypatch.context() as patched:
        patched.setattr(loop_module, "LOGGED_LATE", ())
        going_wrong(patched, step=3, factor=math.nan)
        run(materials, tmp_path / "waited" / "one", stage)
    going_wrong_late(monkeypatch, step=3)
    run(materials, tmp_path / "late" / "one", stage)

    assert [line["step"] for line in metrics(tmp_path / "late" / "one") if line["skipped"]] == [3]
    assert_same_result(tmp_path / "late" / "one", tmp_path / "waited" / "one")


def test_a_kill_between_a_step_and_its_line_costs_no_bit(late, materials, never_killed, tmp_path, monkeypatch):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        from factory import dying_at

        patched.setattr(loop_module, "start_step", dying_at(loop_module.start_step, 4))
        assert in_child(lambda: run(materials, out)) == -9
    run(materials, out)
    assert_same_result(out, never_killed)


@pytest.mark.gpu
def test_the_last_step_takes_as_long_as_the_others(materials, tmp_path):
    """Its numbers are asked for at once, those of the others a step later: the device's clock counts."""
    run_stage(STAGE, materials, tmp_path / "one", seed=0, device=torch.device("cuda"))
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "one" / METRICS).read_text().splitlines()][1:]
    assert min(seconds) > max(seconds) / 10
