"""A stage that is killed and run again ends as one never killed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from factory import (
    count_file_events,
    dying_at,
    dying_if,
    in_child,
    in_child_dying_at_file_event,
)
from unspool.training import loop as loop_module
from unspool.training import stage as stage_module
from unspool.training.checkpoint import save

from .stage_runs import STAGE, assert_same_result, kill_after_step, run

KILLS = {
    "before any step": kill_after_step(0),
    "after step 1, before any checkpoint": kill_after_step(1),
    "after step 3": kill_after_step(3),
    "after step 5": kill_after_step(5),
    "while the first checkpoint is written": lambda patch: patch(
        save, "_sync", dying_if(save._sync, lambda path: path.parent.name == "step-000002.partial")
    ),
    "while the last checkpoint is written": lambda patch: (
        patch(loop_module, "CHEAP_S", 0.0),
        patch(save, "_sync", dying_if(save._sync, lambda path: path.parent.name == "step-000006.partial")),
    ),
    "while old checkpoints are removed": lambda patch: patch(save, "_prune", dying_at(save._prune, 2)),
    "while the model is exported after the last checkpoint": lambda patch: (
        patch(loop_module, "CHEAP_S", 0.0),
        patch(stage_module, "save_stage_state", dying_at(lambda: None, 1)),
    ),
    "while the model is exported": lambda patch: patch(stage_module, "save_stage_state", dying_at(lambda: None, 1)),
    "just before the folder appears": lambda patch: patch(
        Path, "rename", dying_if(Path.rename, lambda path, target: target.name == "one")
    ),
    "just after the folder appeared": lambda patch: patch(
        Path, "rename", dying_if(Path.rename, lambda path, target: path.name == "one.work")
    ),
    "while the checkpoints of the published stage are removed": lambda patch: patch(
        shutil, "rmtree", dying_if(shutil.rmtree, lambda path, **options: path.name.startswith("one.work."))
    ),
}
PUBLISHED = list(KILLS)[-2:]


@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_stage_resumes_and_ends_with_the_same_bits(moment, materials, never_killed, tmp_path, monkeypatch):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        KILLS[moment](patched.setattr)
        assert in_child(lambda: run(materials, out)) == -9
    published = out.exists()

    run(materials, out)

    assert published == (moment in PUBLISHED)
    assert_same_result(out, never_killed)


def test_kills_at_random_moments_of_the_whole_stage_end_with_the_same_bits(materials, never_killed, tmp_path):
    events = count_file_events(lambda: run(materials, tmp_path / "counted" / "one"), tmp_path / "events")
    rng = np.random.default_rng(0)
    for part in range(3):
        out = tmp_path / f"part-{part}" / "one"
        # One kill somewhere in each third, and a second one soon after going on.
        first = int((part + rng.random()) * events / 3) + 1
        assert in_child_dying_at_file_event(lambda out=out: run(materials, out), first) == -9
        in_child_dying_at_file_event(lambda out=out: run(materials, out), int(rng.integers(1, events // 2)))

        run(materials, out)

        assert_same_result(out, never_killed)


def test_a_resumed_stage_says_where_it_goes_on_and_does_not_repeat_what_is_kept(
    materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(5)(patched.setattr)
        in_child(lambda: run(materials, out))
    steps = []
    true_step = loop_module.train_step
    monkeypatch.setattr(
        loop_module, "train_step", lambda *args, **kwargs: steps.append(1) or true_step(*args, **kwargs)
    )

    run(materials, out)

    assert (
        "stage one: 6 steps, 384 tokens at 32 on cpu (not built yet, resuming after step 4)" in capsys.readouterr().err
    )
    assert len(steps) == 2


def test_work_of_another_configuration_is_set_aside_and_said_to_be(
    materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    other = STAGE.model_copy(update={"lr": 5e-3})
    with monkeypatch.context() as patched:
        kill_after_step(3)(patched.setattr)
        in_child(lambda: run(materials, out, other))
    assert (tmp_path / "one.work" / "checkpoints").is_dir()

    run(materials, out)

    said = capsys.readouterr().err
    assert "resuming" not in said
    assert "stage one: not using the unfinished work in one.work (2 trained steps)" in said
    assert "kept as one.work.previous" in said
    kept = tmp_path / "one.work.previous"
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["step-000002"]
    shutil.rmtree(kept)
    assert_same_result(out, never_killed)


@pytest.mark.parametrize("between", ["killed", pytest.param("finished", marks=pytest.mark.slow)])
def test_changing_a_recipe_back_resumes_what_was_set_aside(
    between, materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    other = STAGE.model_copy(update={"lr": 5e-3})
    with monkeypatch.context() as patched:
        kill_after_step(5)(patched.setattr)
        in_child(lambda: run(materials, out))
        if between == "killed":
            kill_after_step(3)(patched.setattr)
            in_child(lambda: run(materials, out, other))
    if between == "finished":
        run(materials, out, other)
    capsys.readouterr()

    run(materials, out)

    said = capsys.readouterr().err
    assert "resuming after step 4" in said
    assert ("(2 trained steps)" in said) == (between == "killed")
    assert (tmp_path / "one.work.previous").exists() == (between == "killed")
    shutil.rmtree(tmp_path / "one.work.previous", ignore_errors=True)
    assert_same_result(out, never_killed)


@pytest.mark.slow
def test_unfinished_work_on_another_recipe_survives_a_run_that_is_up_to_date(materials, tmp_path, monkeypatch, capsys):
    out = tmp_path / "one"
    other = STAGE.model_copy(update={"lr": 5e-3})
    run(materials, out)
    with monkeypatch.context() as patched:
        kill_after_step(5)(patched.setattr)
        in_child(lambda: run(materials, out, other))

    run(materials, out)  # changed back: nothing to do
    run(materials, out, other)

    said = capsys.readouterr().err
    assert "stage one: up to date" in said
    assert "resuming after step 4" in said


def test_where_every_checkpoint_is_damaged_the_stage_says_that_it_starts_over(
    materials, never_killed, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "one"
    with monkeypatch.context() as patched:
        kill_after_step(5)(patched.setattr)
        in_child(lambda: run(materials, out))
    saved = sorted((tmp_path / "one.work" / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["step-000002", "step-000004"]
    for path in saved:
        (path / "state.json").write_text("{}")

    run(materials, out)

    said = capsys.readouterr().err
    assert "stage one: every checkpoint is damaged; the stage starts over from step 1" in said
    assert said.count("rolling back to the previous one") == 1
    assert_same_result(out, never_killed)


def test_how_often_checkpoints_are_written_changes_no_bit_and_redoes_nothing(materials, never_killed, tmp_path, capsys):
    out = tmp_path / "one"
    rarely = STAGE.model_copy(update={"checkpoint_every": 100})

    run(materials, out, rarely)
    assert_same_result(out, never_killed)

    capsys.readouterr()
    run(materials, out, STAGE)
    assert capsys.readouterr().err == "stage one: up to date\n"
