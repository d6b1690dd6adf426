"""The recipe `prolong` as a system, on the shipped model: `unspool run prolong-tiny`."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.evals.suites import short
from unspool.recipe.load import load_recipe
from unspool.recipe.run import open_run, stage_inputs
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.stage import run_stage


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The whole run; lm-eval, which is not needed to develop, is played where it is not installed."""
    folder = tmp_path_factory.mktemp("prolong") / "run"
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("lm_eval") is None:
            cell = {"suite": "short", "task": "next_word", "metric": "acc", "length": 0, "depth": None, "n": 100}
            patch.setattr(short, "check_tasks", lambda tasks, include: None)
            patch.setattr(short, "run_short", lambda *_, **__: {"cells": [{**cell, "value": 0.5}]})
        done = CliRunner().invoke(build_app(), ["run", "prolong-tiny", "--set", f"out={folder}"])
    assert done.exit_code == 0, done.output
    return folder


def steps_of(stage: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


@pytest.mark.slow
def test_all_stages_train_each_with_a_schedule_of_its_own(out):
    stages = {stage.name: stage for stage in load_recipe("prolong-tiny").recipe.stages}
    for name, stage in stages.items():
        rates = [step["lr"] for step in steps_of(out / "stages" / name)]
        assert len(rates) >= 20 and max(rates) == pytest.approx(stage.lr)
        assert rates[-1] == pytest.approx(stage.lr * stage.min_lr_ratio, rel=0.05), "decayed before the next one begins"
    # 20 steps and 20 more at 512K; SFT counts from zero.
    counts = [load_file(out / "stages" / name / OPTIMIZER)["model.norm.weight/step"].item() for name in stages]
    assert counts == [20, 40, 20]
    config = json.loads((out / "stages" / "sft" / "model" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rope_parameters"]["rope_theta"]) == (2048, 76800)


@pytest.mark.slow
def test_the_first_update_at_512k_has_the_moments_of_64k(out, tmp_path):
    context = open_run(load_recipe("prolong-tiny", [f"out={out}"]))
    first, second, _ = context.recipe.stages
    one_step = second.model_copy(update={"tokens": second.batch_tokens, "warmup_ratio": 0.0, "weight_decay": 0.0})
    before = load_file(out / "stages" / first.name / "model" / "model.safetensors")
    moments = load_file(out / "stages" / first.name / OPTIMIZER)

    def update(state: str) -> dict[str, torch.Tensor]:
        stage = one_step.model_copy(update={"optimizer_state": state})
        run_stage(stage, stage_inputs(context, second), tmp_path / state, seed=0, device=torch.device("cpu"))
        after = load_file(tmp_path / state / "model" / "model.safetensors")
        return {name: (after[name] - before[name]) / second.lr for name in before if f"{name}/exp_avg" in moments}

    warm, cold = update("keep"), update("reset")
    name = "model.layers.1.mlp.down_proj.weight"
    # A cold AdamW moves every weight by the learning rate, whatever its gradient; a warm one follows its momentum.
    assert cold[name].abs().quantile(0.1) > 0.9
    assert warm[name].abs().median() < 0.5
    direction = -moments[f"{name}/exp_avg"].flatten()
    along = [torch.cosine_similarity(found[name].flatten(), direction, dim=0).item() for found in (warm, cold)]
    assert along[0] > along[1] + 0.1, along


@pytest.mark.slow
def test_scores_are_made_when_the_paper_makes_them_and_are_in_the_report(out):
    found = {}
    for folder in (out / "scores").iterdir():
        cells = json.loads((folder / "summary.json").read_text())["cells"]
        found[folder.name] = {cell["suite"] for cell in cells if cell["value"] is not None}
    assert found == {"base": {"short"}, "512k": {"short"}, "sft": {"short", "helmet", "ruler"}}
    page = (out / "report.html").read_text()
    for text in ("Short context", "next_word", "HELMET by category", "RULER", "512k", "sft"):
        assert text in page, text
