"""A stage ends with the same weights however often it is killed, and is redone only for a reason, which it says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from factory import (
    build_model,
    save_folder,
    save_rows,
)
from unspool.core.artifacts import read_manifest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.data.mixture import Mix
from unspool.data.packing.row import labels
from unspool.training.loop import learning_rate
from unspool.training.metrics.logger import METRICS
from unspool.training.stage import StageInputs, run_stage

from .stage_runs import LONG, SHORT, STAGE, assert_same_result, metrics, run

# The result


def test_a_stage_trains_as_a_plain_loop_over_stock_transformers_does(materials, never_killed):
    """Every document alone, full logits, one mean per step, clipped, AdamW."""
    rows = {"long": LONG, "short": SHORT}
    mix = Mix(STAGE.mix, {"long": 7, "short": 5}, {"long": 32, "short": 16}, 32, 0)
    model = build_model(attention="eager", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": STAGE.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=STAGE.betas)
    losses = []
    for step in range(1, 7):
        total, count = torch.zeros(()), 0
        for name, index in [pick for slot in (2 * step - 2, 2 * step - 1) for pick in mix.slot(slot)]:
            row = rows[name][index]
            wanted = torch.from_numpy(labels(row.tokens, row.doc_lens, row.loss_mask))
            ids = torch.from_numpy(row.tokens.astype(np.int64))
            lens = row.doc_lens.tolist()
            for part, target in zip(torch.split(ids, lens), torch.split(wanted, lens), strict=True):
                total = total + functional.cross_entropy(model(part[None]).logits[0], target, reduction="sum")
                count += int((target != -100).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), STAGE.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(STAGE, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)

    trained = AutoModelForCausalLM.from_pretrained(never_killed / "model")
    assert [line["loss"] for line in metrics(never_killed)] == pytest.approx(losses, rel=1e-5)
    start = build_model().state_dict()
    for name, tensor in trained.state_dict().items():
        # AdamW turns a rounding of an almost empty gradient into a whole step, so not every single weight can agree.
        moved = (tensor - start[name]).norm()
        assert (tensor - model.state_dict()[name]).norm() < 1e-2 * moved, name


def test_the_folder_holds_model_moments_metrics_and_manifest(never_killed):
    lines = [json.loads(line) for line in (never_killed / METRICS).read_text().splitlines()]

    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 7)]
    assert [line["lr"] for line in lines] == [learning_rate(STAGE, step) for step in range(1, 7)]
    assert all(set(line["losses"]) <= {"long", "short"} for line in lines)
    assert all(line["seconds"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert read_manifest(never_killed)["counts"] == {"steps": 6, "tokens": 384}
    config = json.loads((never_killed / "model" / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 5e5


def test_a_stage_says_where_its_time_went(materials, tmp_path):
    seconds = run_stage(STAGE, materials, tmp_path / "one", seed=0, device=torch.device("cpu"))
    assert {"checks", "load", "first step", "steps", "export", "total"} <= seconds.keys()
    assert sum(seconds.values()) <= 2 * seconds["total"] + 0.1


# Redone or not


@pytest.fixture
def finished(never_killed, tmp_path) -> Path:
    return Path(shutil.copytree(never_killed, tmp_path / "runs" / "one"))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_finished_stage_is_left_alone(materials, finished, capsys):
    before = times(finished)

    run(materials, finished)

    assert capsys.readouterr().err == "stage one: up to date\n"
    assert times(finished) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda inputs: {"stage": STAGE.model_copy(update={"lr": 2e-3})}, "(changed settings: stage)"),
        (lambda inputs: {"seed": 1}, "(changed settings: seed)"),
    ],
)
def test_a_changed_setting_redoes_the_stage_and_says_which(change, reason, materials, finished, never_killed, capsys):
    run(materials, finished, **change(materials))

    assert reason in capsys.readouterr().err
    name = "model/model.safetensors"
    assert (finished / name).read_bytes() != (never_killed / name).read_bytes()


# Settings of `STAGE` in the manifests and keys of stages that were trained before a key was added.
STORED = {
    "activation_checkpointing": "none",
    "attention": "intra_document",
    "batch_tokens": 64,
    "betas": [0.9, 0.95],
    "compile": False,
    "context_length": 32,
    "export_context_length": None,
    "lr": 0.001,
    "lr_overrides": {},
    "max_grad_norm": 1.0,
    "micro_batch_tokens": None,
    "min_lr_ratio": 0.1,
    "mix": {"long": 0.6, "short": 0.4},
    "name": "one",
    "rope": {"base": 500000.0, "method": "abf"},
    "tokens": 384,
    "warmup_ratio": 0.1,
    "weight_decay": 0.1,
}


def test_a_key_that_was_added_later_does_not_redo_a_stage_that_has_its_default(never_killed):
    assert read_manifest(never_killed)["settings"]["stage"] == STORED


def test_another_schedule_redoes_the_stage(materials, finished, capsys):
    changed = STAGE.model_copy(update={"schedule": "linear"})
    run(materials, finished, changed)

    assert "(changed settings: stage)" in capsys.readouterr().err
    assert read_manifest(finished)["settings"]["stage"] == STORED | {"schedule": "linear"}
    assert [line["lr"] for line in metrics(finished)] == [learning_rate(changed, step) for step in range(1, 7)]


def test_changed_rows_and_a_changed_model_redo_the_stage_and_say_which(materials, finished, tmp_path, capsys):
    rows = save_rows(tmp_path / "short", SHORT[:4])
    run(StageInputs(model=materials.model, datasets=materials.datasets | {"short": rows}), finished)
    assert "(changed inputs: rows short)" in capsys.readouterr().err

    model = save_folder(tmp_path / "model", build_model(seed=1))
    run(StageInputs(model=str(model), datasets=materials.datasets | {"short": rows}), finished)
    assert "(changed inputs: model)" in capsys.readouterr().err


def test_a_damaged_result_is_redone_and_the_same_again(materials, finished, never_killed, capsys):
    path = finished / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    run(materials, finished)

    assert "(file model/model.safetensors has changed)" in capsys.readouterr().err
    assert_same_result(finished, never_killed)


# Refusals


def test_a_step_that_is_not_a_number_stops_with_the_step_the_rows_and_the_way_out(materials, tmp_path):
    wild = STAGE.model_copy(update={"lr": 1e30})

    with pytest.raises(UnspoolError) as error:
        run(materials, tmp_path / "one", wild)

    sentence = str(error.value)
    assert "stage one: step 2: the loss or gradient is not finite (rows " in sentence
    assert "lower stages.one.lr" in sentence
    mix = Mix(STAGE.mix, {"long": 7, "short": 5}, {"long": 32, "short": 16}, 32, 0)
    assert all(f"{name}[{index}]" in sentence for slot in (2, 3) for name, index in mix.slot(slot))
    assert not (tmp_path / "one").exists()
    assert [line["step"] for line in metrics(tmp_path / "one.work")] == [1]


def test_a_model_that_training_would_get_wrong_is_refused_before_any_step(materials, tmp_path, monkeypatch):
    # As if no config named how this one changes its logits.
    monkeypatch.setattr("unspool.models.loss._FACTORS", {})
    model = save_folder(tmp_path / "model", build_model("Granite", logits_scaling=4.0))

    with pytest.raises(ConfigError, match="logits after the head"):
        run(StageInputs(model=str(model), datasets=materials.datasets), tmp_path / "one")

    assert not (tmp_path / "one").exists()


def test_a_stage_may_claim_less_than_it_trains_on(materials, tmp_path):
    run(materials, tmp_path / "one", STAGE.model_copy(update={"export_context_length": 16}))

    config = json.loads((tmp_path / "one" / "model" / "config.json").read_text())
    assert config["max_position_embeddings"] == 16 < STAGE.context_length
