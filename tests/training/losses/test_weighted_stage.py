"""Whole stages with weighted labels: recipe, resume, manifest."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import unspool
from factory import CPU, build_model, build_stage, random_row, save_folder, save_mini, save_rows
from training.stage_runs import assert_same_result, metrics
from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest
from unspool.training import loop as loop_module
from unspool.training.stage import StageInputs, run_stage

LOSSES = {
    "exact": {"weights": "exact", "threshold": 8, "extra": 0.5},
    "longce": {"weights": "longce", "short_context": 4, "stride": 4, "max_weight": 5.0},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("inputs")
    rows = [random_row((20, 12), seed, mask=0.3) for seed in range(7)]
    return StageInputs(model=str(save_folder(folder / "model")), datasets={"long": save_rows(folder / "long", rows)})


def train(inputs: StageInputs, out: Path, **changes) -> Path:
    run_stage(build_stage(checkpoint_every=2, **changes), inputs, out, seed=0, device=CPU)
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_a_stage_that_is_interrupted_ends_with_the_same_weights(inputs, name, tmp_path, monkeypatch):
    whole = train(inputs, tmp_path / "a" / "whole", loss=LOSSES[name])
    true_step, calls = loop_module.train_step, []

    def failing(*args, **more):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true_step(*args, **more)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop_module, "train_step", failing)
        train(inputs, tmp_path / "b" / "parts", loss=LOSSES[name])
    parts = train(inputs, tmp_path / "b" / "parts", loss=LOSSES[name])

    assert_same_result(parts, whole)
    plain = train(inputs, tmp_path / "c" / "plain")
    assert metrics(plain)[0]["loss"] != pytest.approx(metrics(whole)[0]["loss"], rel=1e-4)


def test_the_default_is_not_in_the_manifest_so_that_earlier_stages_stay_valid(inputs, tmp_path):
    plain = train(inputs, tmp_path / "plain")
    weighted = train(inputs, tmp_path / "weighted", loss=LOSSES["exact"])

    assert "loss" not in (read_manifest(plain) or {})["settings"]["stage"]
    assert (read_manifest(weighted) or {})["settings"]["stage"]["loss"] == LOSSES["exact"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_recipe_trains_with_weights_from_python_and_from_the_command(name, tmp_path, caplog):
    recipe = save_mini(tmp_path)
    sets = {"stages.0.loss": LOSSES[name], "stages.2.loss": LOSSES[name], "evals": []}

    with caplog.at_level("INFO"):
        unspool.run(recipe, sets | {"out": str(tmp_path / "python")})
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = CliRunner().invoke(build_app(), ["run", str(recipe), *words, "--set", f"out={tmp_path / 'command'}"])

    assert done.exit_code == 0, done.output
    for stage in ("first", "utk"):
        files = [tmp_path / way / "stages" / stage / "metrics.jsonl" for way in ("python", "command")]
        first, second = ([json.loads(line)["loss"] for line in path.read_text().splitlines()] for path in files)
        assert first == second
        assert len(first) >= 2
    if name == "exact":
        assert "stage utk: loss weights by effective context: below 8 " in caplog.text


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"weights": "exakt"}, "exact"),
        ({"weights": "exact", "extra": 1.0}, "extra"),
        ({"weights": "exact", "threshold": "100K"}, "threshold"),
        ({"weights": "longce", "short_context": "1K"}, "all weights are 1"),
        ({"weights": "longce", "max_weight": 0}, "max_weight"),
        ({"weights": "exact", "thershold": "1K"}, "threshold"),
    ],
)
def test_wrong_settings_are_refused_without_a_traceback(loss, message, tmp_path):
    recipe = save_mini(tmp_path)

    words = ["recipes", "check", str(recipe), "--set", f"stages.0.loss={json.dumps(loss)}"]
    done = CliRunner().invoke(build_app(), words)

    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_longce_refuses_ranks_that_share_rows(tmp_path):
    recipe = save_mini(tmp_path)

    sets = ["--set", f"stages.0.loss={json.dumps(LOSSES['longce'])}", "--set", "stages.0.parallel={ulysses: 2}"]
    done = CliRunner().invoke(build_app(), ["recipes", "check", str(recipe), *sets])

    assert done.exit_code == 2
    assert "needs parallel.ulysses 1" in " ".join(done.stderr.split())


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weighted_stage_on_cuda_follows_the_cpu_to_bfloat16(name, compiled, tmp_path):
    model = save_folder(tmp_path / "model", build_model(hidden_size=128, initializer_range=0.1))
    rows = save_rows(tmp_path / "long", [random_row((20, 12), seed, mask=0.3) for seed in range(7)])
    inputs = StageInputs(model=str(model), datasets={"long": rows})
    for device in ("cpu", "cuda"):
        stage = build_stage(tokens=192, micro_batch_tokens=32, loss=LOSSES[name], compile=compiled and device == "cuda")
        run_stage(stage, inputs, tmp_path / device / "one", seed=0, device=torch.device(device))

    cpu, cuda = ([step["loss"] for step in metrics(tmp_path / device / "one")] for device in ("cpu", "cuda"))
    assert len(cpu) == 3
    # LongCE's weights are ratios of probabilities, which bf16 changes more than losses.
    assert cuda == pytest.approx(cpu, rel=1e-2 if name == "exact" else 3e-2)
