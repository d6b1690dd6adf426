import json
import shutil
from pathlib import Path

import pytest

from unspool.core.errors import ConfigError, DataError
from unspool.reporting.gather import gather

from .fake_run import (
    LENGTHS,
    NUM_STEPS,
    STEP_TOKENS,
    fake_scores,
    fake_steps,
    recall_cell,
    validation_lines,
    write_scores,
)


def test_models_come_base_first_then_as_in_the_recipe(fake_run: Path):
    recipe = fake_run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: abf", "name: zeta"))
    (fake_run / "scores" / "abf").rename(fake_run / "scores" / "zeta")

    assert [model.name for model in gather(fake_run).models] == ["base", "zeta", "utk"]


def test_facts_stages_and_cells_are_read(fake_run: Path):
    results = gather(fake_run)

    assert (results.name, results.original_context, results.target_context) == ("tiny", 256, 2048)
    assert results.lengths("niah") == list(LENGTHS)
    assert results.trained_tokens("utk") == NUM_STEPS * STEP_TOKENS
    assert results.seconds["stages/abf"] == 70.1
    base = results.before
    assert base is not None
    beyond = base.recall("niah", 2048)
    assert beyond is not None
    assert (beyond.value, beyond.n) == (0.0, 40)
    assert [(cell.start, cell.stop) for cell in base.losses()][-1] == (1024, 2048)


def test_what_was_not_scored_is_none_not_zero(fake_run: Path):
    write_scores(fake_run, "base", [recall_cell("key_value", 2048, None, 0, 0)], [])

    base = gather(fake_run).before
    assert base is not None
    assert (base.cells[0].value, base.cells[0].n, base.cells[0].low) == (None, 0, None)


def test_a_folder_without_manifest_is_not_a_result(fake_run: Path):
    (fake_run / "scores" / "utk" / "manifest.json").unlink()
    shutil.copytree(fake_run / "scores" / "abf", fake_run / "scores" / "abf.partial")

    assert [model.name for model in gather(fake_run).models] == ["base", "abf"]


def test_a_stage_in_progress_shows_its_steps_up_to_the_last_whole_line(fake_run: Path):
    shutil.rmtree(fake_run / "stages" / "utk")
    work = fake_run / "stages" / "utk.work"
    work.mkdir()
    lines = [json.dumps(step) for step in fake_steps("utk")[:7]]
    (work / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "tok')

    stage = gather(fake_run).stages[1]
    assert (stage.name, stage.finished, len(stage.steps)) == ("utk", False, 7)


def test_steps_repeated_after_a_resume_count_once(fake_run: Path):
    metrics = fake_run / "stages" / "abf" / "metrics.jsonl"
    again = {**fake_steps("abf")[9], "loss": 1.25}
    metrics.write_text(metrics.read_text() + json.dumps(again) + "\n")

    steps = gather(fake_run).stages[0].steps
    assert len(steps) == NUM_STEPS
    assert steps[9].loss == 1.25


def test_a_loss_that_is_not_finite_is_missing(fake_run: Path):
    metrics = fake_run / "stages" / "abf" / "metrics.jsonl"
    metrics.write_text(json.dumps({**fake_steps("abf")[0], "loss": float("nan")}) + "\n")

    assert gather(fake_run).stages[0].steps[0].loss is None


def test_validation_is_read_with_the_farthest_positions_that_hold_tokens(fake_run: Path):
    (fake_run / "stages" / "abf" / "validation.jsonl").write_text(validation_lines(4.0, 3.5))

    first, second = gather(fake_run).stages[0].validation
    assert (first.step, first.loss, first.farthest, first.span) == (0, 4.0, 3.0, (64, 128))
    assert (second.step, second.tokens, second.loss) == (10, 10 * STEP_TOKENS, 3.5)
    assert gather(fake_run).stages[1].validation == ()


def test_stages_know_their_parents(fake_run: Path):
    recipe = fake_run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: utk, init: base", "name: utk"))

    results = gather(fake_run)
    assert [stage.parent for stage in results.stages] == [None, "abf"]
    assert [model.name for model in results.arms] == ["utk"]
    assert results.trained_tokens("utk") == 2 * NUM_STEPS * STEP_TOKENS


def test_samples_are_the_first_of_each_depth_at_the_longest_length(fake_run: Path):
    cells, samples = fake_scores("abf")
    write_scores(fake_run, "abf", cells, samples[::-1])

    chosen = [sample for sample in gather(fake_run).models[1].samples if sample.suite == "niah"]
    assert [(sample.length, sample.index) for sample in chosen] == [(2048, 0)] * 4
    assert [sample.depth for sample in chosen] == [0.0, 0.25, 0.75, 1.0]


def test_lines_that_are_not_questions_are_skipped(fake_run: Path):
    cells, samples = fake_scores("base")
    window = {"suite": "perplexity", "length": 2048, "depth": None, "index": 0, "hash": "x", "score": 3.5, "losses": []}
    write_scores(fake_run, "base", cells, [*samples, window])

    base = gather(fake_run).before
    assert base is not None
    assert {sample.suite for sample in base.samples} == {"niah", "key_value"}


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, exists: bool):
    folder = tmp_path / "nothing"
    if exists:
        folder.mkdir()
    with pytest.raises(ConfigError, match=r"nothing (is not a run|does not exist).*output folder of a recipe"):
        gather(folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("recipe.yaml", "name: [", "recipe.yaml is not YAML"),
        ("run.json", "{", "run.json is missing or not JSON"),
        ("run.json", '{"seconds": 3}', "run.json cannot be read"),
        ("run.json", "[]", "run.json should hold a JSON object"),
        ("scores/abf/summary.json", '{"cells": [{"suite": "key_value"}]}', "summary.json: cell 0 cannot be read"),
        ("scores/abf/samples.jsonl", '{"reference": "a", "output": "b"}', "samples.jsonl: line 1 is not a sample"),
        ("stages/abf/metrics.jsonl", '{"step": 1}', "metrics.jsonl: line 1 is not a training step"),
        ("stages/abf/metrics.jsonl", '{"step": 1, "to', "metrics.jsonl: line 1 is not JSON"),
        ("stages/abf/validation.jsonl", '{"step": 1}', "validation.jsonl: line 1 is not a validation"),
        ("datasets/short/manifest.json", "{", "manifest.json is damaged"),
    ],
)
def test_a_damaged_file_is_named(fake_run: Path, file: str, text: str, message: str):
    (fake_run / file).write_text(text)
    with pytest.raises(DataError, match=message):
        gather(fake_run)
