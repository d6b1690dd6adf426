"""The whole road: every box is made once, redone only for a reason, and ends the same however often it is killed."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from factory import SMALL_SIZE, count_file_events, in_child_dying_at_file_event, save_folder, save_mini
from unspool.core.errors import ConfigError
from unspool.models.config import SIZES
from unspool.models.extend import pick_device
from unspool.recipe import prepare
from unspool.recipe.load import load_recipe
from unspool.recipe.run import open_run, stage_inputs, train
from unspool.recipe.run import run as run_recipe
from unspool.training.checkpoint.snapshot import find_snapshots


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "4M", SMALL_SIZE)
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return save_mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture(scope="module")
def whole(recipe) -> Path:
    """A run that nothing happened to."""
    run(recipe, recipe.parent / "whole")
    return recipe.parent / "whole"


@pytest.fixture
def finished(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def run(recipe: Path, out: Path, *sets: str):
    return run_recipe(open_run(load_recipe(recipe, [f"out={out}", *sets])))


def results(out: Path) -> dict[str, bytes]:
    """What a run is for: weights and scores."""
    found = [*out.glob("stages/*/model/model.safetensors"), *out.glob("scores/*/samples.jsonl")]
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def said(capsys) -> list[str]:
    """Without a stage's progress, its duration, and its wait for a slow disk."""
    passing = re.compile(r"stage \S+: (\d+/\d+  |step \d+ waited |finished in )")
    return [line for line in capsys.readouterr().err.splitlines() if not passing.match(line)]


def redone(lines: list[str]) -> list[str]:
    return [line for line in lines[1:] if not line.endswith("up to date")]


# The result


def test_every_box_of_the_recipe_is_there(whole):
    boxes = sorted(str(path.parent.relative_to(whole)) for path in whole.glob("*/*/manifest.json"))

    assert boxes == [
        "corpus/books",
        "datasets/long",
        "datasets/tangled",
        "scores/abf",
        "scores/first",
        "scores/utk",
        "stages/abf",
        "stages/first",
        "stages/utk",
    ]
    assert sorted(path.name for path in whole.iterdir() if path.is_file()) == ["recipe.yaml", "report.html", "run.json"]
    assert len(results(whole)) == 6


def test_the_recipe_that_was_written_down_gives_the_same_run(recipe, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(recipe.parent)

    run(whole / "recipe.yaml", tmp_path / "again")

    assert results(tmp_path / "again") == results(whole)


def test_arms_differ_and_start_from_the_same_model(whole):
    weights = results(whole)

    assert len(set(weights.values())) == 6
    tokenizers = {name: (whole / "stages" / name / "model" / "tokenizer.json").read_text() for name in ("abf", "utk")}
    assert all("<|knot:D|>" in text for text in tokenizers.values()), "the shipped tokenizer has the knots already"


# Again


def test_a_second_run_does_nothing_and_says_so(recipe, finished, capsys):
    run(recipe, finished)
    said(capsys)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    times = {path: path.stat().st_mtime_ns for path in before if path.parent != finished}

    run(recipe, finished)

    assert said(capsys)[1:] == [
        "corpus books: up to date",
        "dataset long: up to date",
        "dataset tangled: up to date",
        "stage first: up to date",
        "scores of first: up to date",
        "stage abf: up to date",
        "scores of abf: up to date",
        "stage utk: up to date",
        "scores of utk: up to date",
    ]
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_changed_arm_is_redone_with_its_scores_and_nothing_else(recipe, finished, capsys):
    run(recipe, finished, "stages.abf.lr=2e-3")

    lines = redone(said(capsys))
    assert [line.split(":")[0].split(" (")[0] for line in lines] == ["stage abf", "scores of abf"]
    assert "(changed settings: stage)" in lines[0]
    assert "(changed inputs: model)" in lines[1]


def test_a_changed_first_stage_redoes_what_starts_from_it_but_no_data(recipe, finished, capsys):
    run(recipe, finished, "stages.first.lr=2e-3")

    lines = redone(said(capsys))
    assert [line.split(":")[0].split(" (")[0] for line in lines] == [
        f"{box} {name}" for name in ("first", "abf", "utk") for box in ("stage", "scores of")
    ]
    assert "(changed inputs: model)" in lines[2]


def test_changed_text_redoes_everything_made_of_it(recipe, finished, tmp_path, capsys):
    moved = save_mini(tmp_path / "moved")
    books = moved.parent / "books.jsonl"
    books.write_text(books.read_text().replace("a", "o"))

    run(recipe, finished, f"sources.books.path={books}")

    assert len(redone(said(capsys))) == 9


def test_a_new_question_redoes_scores_only(recipe, finished, capsys):
    run(recipe, finished, "evals.1.samples=3")

    lines = redone(said(capsys))
    assert [line.split(" (")[0] for line in lines] == ["scores of first", "scores of abf", "scores of utk"]
    assert all("(changed settings: evals)" in line for line in lines)


def test_the_time_a_box_took_stays_when_it_is_only_checked(recipe, finished, monkeypatch):
    context = open_run(load_recipe(recipe, [f"out={finished}"]))
    before = context.notes()["seconds"]
    slow = iter(range(0, 100_000, 100))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(slow)))

    run_recipe(context)

    assert context.notes()["seconds"] == before
    assert set(before) == {str(path.parent.relative_to(finished)) for path in finished.glob("*/*/manifest.json")}


# Kills


def test_kills_at_three_random_moments_end_with_the_same_weights_and_scores(recipe, whole, tmp_path):
    events = count_file_events(lambda: run(recipe, tmp_path / "counted"), tmp_path / "events")
    out = tmp_path / "out"
    rng = random.Random(0)
    for part in range(3):
        # Finished parts are skipped in a few events, so later kills hit later parts of the run.
        number = int((part + rng.random()) * events / 6) + 1
        assert in_child_dying_at_file_event(lambda: run(recipe, out), number) == -9, "nothing was killed"

    run(recipe, out)

    assert results(out) == results(whole)
    leftovers = [path for path in out.glob("*/*") if path.suffix in (".partial", ".work", ".old", ".tmp")]
    assert leftovers == []


@pytest.mark.slow
def test_kills_at_ten_random_times_end_with_the_same_weights_and_scores(tmp_path):
    """The real command in a separate process, killed after a time, possibly in the middle of a write."""
    recipe = save_mini(tmp_path / "mini")
    command = [sys.executable, "-m", "unspool.cli.main", "run", str(recipe), "--set"]
    began = time.monotonic()
    subprocess.run([*command, f"out={tmp_path / 'whole'}"], check=True, capture_output=True)
    seconds = time.monotonic() - began
    rng = random.Random(0)
    out = tmp_path / "out"
    killed = 0
    for _ in range(10):
        child = subprocess.Popen([*command, f"out={out}"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1) * seconds)
        child.send_signal(signal.SIGKILL)
        if child.wait() == -signal.SIGKILL:
            killed += 1
        else:
            # The machine was busier when the time was taken: begin anew, or nothing would be left to kill.
            shutil.rmtree(out)

    subprocess.run([*command, f"out={out}"], check=True, capture_output=True)

    assert killed, "every run was over before it could be killed"
    assert results(out) == results(tmp_path / "whole")


# Where things are found


@pytest.mark.parametrize("place", [".", "..", "elsewhere"])
def test_paths_are_found_next_to_the_recipe_from_any_folder(place, recipe, tmp_path, monkeypatch):
    (recipe.parent / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(recipe.parent / place)
    given = Path(os.path.relpath(recipe))

    context = open_run(load_recipe(given, [f"out={tmp_path / 'out'}"]))

    assert prepare.tokenize(context)["books"]["documents"] == 20
    assert context.loaded.evals()[0].text == str(given.parent / "held-out.jsonl")


# Where a stage starts


def test_a_stage_takes_model_and_moments_of_the_one_it_starts_from(recipe, whole):
    context = open_run(load_recipe(recipe, [f"out={whole}", "stages.utk.init=previous"]))
    first, abf, utk = context.recipe.stages

    assert stage_inputs(context, first).model == context.model
    for stage, name in ((abf, "first"), (utk, "abf")):
        inputs = stage_inputs(context, stage)
        assert inputs.model == str(whole / "stages" / name / "model")
        assert inputs.moments == whole / "stages" / name / "optimizer.safetensors"


def test_a_stage_that_starts_from_the_model_takes_no_moments(recipe, whole):
    context = open_run(load_recipe(recipe, [f"out={whole}", "stages.abf.init=base"]))

    inputs = stage_inputs(context, context.recipe.stages[1])
    assert (inputs.model, inputs.moments) == (context.model, None)


def test_a_stage_whose_start_is_not_trained_is_refused(recipe, tmp_path):
    context = open_run(load_recipe(recipe, [f"out={tmp_path / 'out'}"]))

    with pytest.raises(ConfigError, match="stage abf starts from stage first, which is not trained yet"):
        train(context, context.recipe.stages[1])


def test_a_stage_alone_does_not_go_on_from_one_that_the_recipe_has_changed(recipe, finished, capsys):
    before = results(finished)
    context = open_run(load_recipe(recipe, [f"out={finished}", "stages.first.lr=2e-3"]))

    with pytest.raises(ConfigError) as error:
        train(context, context.recipe.stages[1])

    assert str(error.value) == (
        "stage abf starts from stage first, which does not match the recipe (changed settings: stage); train it first "
        "with `stage='first'`, or omit `stage` to train all stages in order."
    )
    assert results(finished) == before

    train(context, context.recipe.stages[0])
    train(context, context.recipe.stages[1])
    assert "(changed inputs: model)" in said(capsys)[-1]


def test_a_stage_alone_is_left_alone_if_nothing_changed(recipe, finished, capsys):
    context = open_run(load_recipe(recipe, [f"out={finished}"]))
    train(context, context.recipe.stages[1])
    assert said(capsys) == ["stage abf: up to date"]


def test_a_model_folder_is_scored_before_and_after(recipe, tmp_path):
    """A model that is not new has something before."""
    folder = save_folder(tmp_path / "model")
    out = tmp_path / "out"
    sets = [
        f"model={folder}",
        "stages=[{name: one, context_length: 128, mix: {long: 1}, tokens: 256, batch_tokens: 256, lr: 1e-3}]",
        "evals=[{suite: perplexity, length: 128, samples: 2, text: held-out.jsonl}]",
    ]

    outcome = run(recipe, out, *sets)

    assert sorted(path.name for path in (out / "scores").iterdir()) == ["base", "one"]
    assert outcome.report == out / "report.html"
    assert "64 → 128" in outcome.headline[0]


# Devices


def test_devices_are_picked_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda is not available here; use auto or cpu"):
        pick_device("cuda")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")


# Scores while a stage trains


def test_eval_every_scores_snapshots_and_the_report_draws_the_curve(recipe, whole, tmp_path):
    out = tmp_path / "out"
    run(
        recipe,
        out,
        "stages.1.tokens=1024",
        "stages.1.eval_every=1",
        "stages.2.tokens=256",
        "evals.0.after=[abf]",
        "evals.1.after=[first, abf]",
        "evals.2.after=[abf]",
    )

    scored = sorted(path.parent.name for path in out.glob("curves/abf/*/manifest.json"))
    assert scored == ["step-000001", "step-000002", "step-000003"]  # the last step is scores/abf
    assert not list(out.glob("snapshots/*/*"))  # deleted once they are scored
    suites = {
        name: {cell["suite"] for cell in read_summary(out / "scores" / name)["cells"]} for name in ("first", "abf")
    }
    assert suites == {"first": {"key_value"}, "abf": {"niah", "key_value", "perplexity"}}
    assert not (out / "scores/utk").exists()
    assert "Key-value recall by tokens trained" in (out / "report.html").read_text()
    # Another first stage would mean that exporting changed the training.
    assert (
        results(out)["stages/first/model/model.safetensors"] == results(whole)["stages/first/model/model.safetensors"]
    )


def test_eval_every_leaves_the_trained_weights_as_they_are(recipe, whole, tmp_path):
    out = tmp_path / "out"
    context = open_run(load_recipe(recipe, [f"out={out}", "stages.0.eval_every=1"]))
    prepare.tokenize(context)
    prepare.pack(context)
    train(context, context.recipe.stages[0])
    snapshots = find_snapshots(out / "stages/first")
    assert sorted(snapshots) == [1, 2]
    assert (
        results(out)["stages/first/model/model.safetensors"] == results(whole)["stages/first/model/model.safetensors"]
    )
    assert (snapshots[1] / "model.safetensors").read_bytes() != (snapshots[2] / "model.safetensors").read_bytes()


def test_an_evaluation_after_an_unknown_stage_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"stage 'second' is not known"):
        load_recipe(recipe, ["evals.0.after=[second]"])
