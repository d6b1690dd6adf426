"""A stage that is watched ends as one that is not, and shows what it was asked to show."""

import json
from dataclasses import replace

import pytest

from factory import in_child, random_row, save_rows
from unspool.core.errors import ConfigError
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.metrics import trackers
from unspool.training.metrics.logger import METRICS, SAMPLES, VALIDATION

from .stage_runs import STAGE, kill_after_step, metrics, run

WATCHED = STAGE.model_validate(
    STAGE.model_dump()
    | {"validation": {"dataset": "held", "every": 2, "samples": 2}, "samples": {"prompts": ["the river"], "tokens": 4}}
)


@pytest.fixture(scope="module")
def watched_materials(materials, tmp_path_factory):
    rows = [random_row((32,), seed) for seed in range(60, 63)]
    return replace(materials, validation=save_rows(tmp_path_factory.mktemp("held") / "held", rows))


def lines(path):
    """Without what the clock says."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


def test_watching_changes_no_bit_of_the_result(watched_materials, never_killed, tmp_path):
    run(watched_materials, tmp_path / "one", stage=WATCHED)
    for name in ("model/model.safetensors", OPTIMIZER):
        assert (tmp_path / "one" / name).read_bytes() == (never_killed / name).read_bytes(), name
    assert metrics(tmp_path / "one") == metrics(never_killed)
    assert [line["step"] for line in lines(tmp_path / "one" / VALIDATION)] == [0, 2, 4, 6]
    assert [line["step"] for line in lines(tmp_path / "one" / SAMPLES)] == list(range(7))


def test_a_finished_stage_is_not_trained_again_to_be_looked_at(watched_materials, tmp_path, capsys):
    run(watched_materials, tmp_path / "one")
    run(watched_materials, tmp_path / "one", stage=WATCHED)
    assert capsys.readouterr().err.splitlines()[-1] == "stage one: up to date"


def test_killed_and_resumed_it_shows_the_same(watched_materials, tmp_path, monkeypatch):
    run(watched_materials, tmp_path / "whole" / "one", stage=WATCHED)
    out = tmp_path / "killed" / "one"

    def killed():
        kill_after_step(3)(monkeypatch.setattr)
        run(watched_materials, out, stage=WATCHED)

    assert in_child(killed) == -9
    assert (out.with_name("one.work") / METRICS).is_file()
    run(watched_materials, out, stage=WATCHED)
    for name in (VALIDATION, SAMPLES):
        assert lines(out / name) == lines(tmp_path / "whole" / "one" / name)
    assert metrics(out) == metrics(tmp_path / "whole" / "one")


def test_a_tracker_that_is_not_there_is_refused_before_any_weight_is_read(materials, tmp_path, monkeypatch):
    true_import = trackers.importlib.import_module

    def missing(name, *package):
        if name == "wandb":
            raise ImportError(f"No module named {name!r}")
        return true_import(name, *package)

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    stage = STAGE.model_validate(STAGE.model_dump() | {"loggers": ["wandb"]})
    with pytest.raises(ConfigError, match="loggers: cannot import wandb"):
        run(materials, tmp_path / "one", stage=stage)
    assert not (tmp_path / "one.work").exists()
