"""The recipe `prolong` as a system, on the shipped model: `unspool run prolong-tiny`."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from data.sources.mds_folders import write
from unspool.cli.main import build_app
from unspool.data.packing.store import open_rows
from unspool.evals.suites import short
from unspool.recipe.load import load_recipe
from unspool.recipe.run import open_run, stage_inputs
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.stage import run_stage


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The whole run, with a fake lm-eval if the real one is not installed."""
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
    settings = {"warmup_ratio": 0.0, "min_lr_ratio": 1.0, "weight_decay": 0.0}
    one_step = second.model_copy(update={"tokens": second.batch_tokens, **settings})
    before = load_file(out / "stages" / first.name / "model" / "model.safetensors")
    moments = load_file(out / "stages" / first.name / OPTIMIZER)

    def update(state: str) -> dict[str, torch.Tensor]:
        stage = one_step.model_copy(update={"optimizer_state": state})
        run_stage(stage, stage_inputs(context, second), tmp_path / state, seed=0, device=torch.device("cpu"))
        after = load_file(tmp_path / state / "model" / "model.safetensors")
        return {name: (after[name] - before[name]) / second.lr for name in before if f"{name}/exp_avg" in moments}

    warm, cold = update("keep"), update("reset")
    name = "model.layers.1.mlp.down_proj.weight"
    # AdamW without state moves every weight by the learning rate, for any gradient; with state it follows its momentum.
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


COLUMNS = {"input_ids": "ndarray:uint32", "indices": "ndarray:uint32", "length": "int", "domain": "str"}


def published(folder: Path, length: int, spans: list[tuple[int, int]], rng: np.random.Generator, **more: Any) -> Any:
    """Six packed rows in the format of the authors' data; returns their tokens."""
    rows = rng.integers(10, 4000, size=(6, length), dtype=np.uint32)
    borders = np.array(spans, dtype=np.uint32)
    samples = [{"input_ids": row, "indices": borders, "length": length, "domain": folder.name, **more} for row in rows]
    write(folder, COLUMNS | dict.fromkeys(more, "ndarray:uint8"), samples)
    return rows


@pytest.mark.slow
def test_the_published_data_are_packed_by_their_indices_and_masks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("prolong-released")
    rng, long, short_rows = np.random.default_rng(0), 256, 64
    rows = {}
    mask = (np.arange(short_rows) % 4 == 3).astype(np.uint8)
    for name, source in loaded.recipe.sources.items():
        is_long = "524288" in source.path
        length = long if is_long else short_rows
        whole = is_long or "65536" in source.path
        spans = [(0, length)] if whole else [(0, 20), (20, length)]
        more = {"mask": mask} if name == "ultrachat" else {}
        rows[name] = published(Path(source.path), length, spans, rng, **more)
    sets = [f"datasets.{name}.seq_len={256 if '512k' in name else 64}" for name in loaded.recipe.datasets]
    sets += ["model=asset:tiny-base", "engine.workers=1", f"out={tmp_path / 'run'}"]

    done = CliRunner().invoke(build_app(), ["pack", "prolong-released", "--json", *(f"--set={text}" for text in sets)])

    assert done.exit_code == 0, done.output
    counts = json.loads(done.stdout)
    for name, source in (("repos-64k", "repos"), ("repos-512k", "repos-long-2"), ("books-64k-2", "books-2")):
        packed = open_rows(tmp_path / "run" / "datasets" / name)
        found = {packed[at].tokens.tobytes() for at in range(len(packed))}
        assert found == {row.tobytes() for row in rows[source]}, "rows of one document are as published"
    assert counts["textbooks-64k"]["documents"] == 12, "two by the indices of each row"
    # The first token of a document is never a target.
    trained = 6 * int(mask[1:20].sum() + mask[21:].sum())
    assert counts["chat"]["trained_tokens"] == trained > 0
