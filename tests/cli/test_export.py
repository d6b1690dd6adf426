"""`unspool export`: a folder for others, its card, its check, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import dynamic_module_utils
from typer.testing import CliRunner

from factory import build_model, build_tokenizer, save_folder
from reporting.fake_run import write_fake_run
from unspool.cli.main import build_app
from unspool.core.artifacts import read_manifest, seal
from unspool.models import export, plain_logits
from unspool.models.export import save_model
from unspool.models.rotary import apply_base, apply_head_bases
from unspool.recipe import export as exporting


def run(*words: Any) -> Any:
    return CliRunner().invoke(build_app(), ["export", *map(str, words)])


@pytest.fixture
def in_this_process(monkeypatch, tmp_path):
    """The other side of the check without the seconds that a process of its own takes to start."""
    monkeypatch.setattr(export, "_run_plain", plain_logits.answers)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def run_dir(tmp_path):
    """A run with scores and two stages: abf has one base, utk a base per head."""
    folder = write_fake_run(tmp_path / "run")
    base = save_folder(folder / "base-model")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A base model\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("asset:tiny-base", "base-model"))
    for stage in ("abf", "utk"):
        model = build_model(max_position_embeddings=2048)
        if stage == "abf":
            apply_base(model, 2e5)
        else:
            apply_head_bases(model, np.array([2e5, 1e4]))
        done = folder / "stages" / stage
        save_model(model, build_tokenizer(), done / "model", dtype=torch.float32)
        known = {name: read_manifest(done)[name] for name in ("kind", "inputs", "settings", "counts")}
        seal(done.rename(done.with_suffix(".partial")), done, **known)
    return folder


def test_a_run_s_stage_is_exported_and_checked_in_a_fresh_process(run_dir, tmp_path):
    done = run(run_dir / "stages" / "utk", tmp_path / "out", "--json")

    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["stage"], told["dtype"], told["remote_code"]) == ("utk", "float32", True)
    checks = {check["name"]: check for check in told["checks"]}
    assert checks["far"]["last_position"] == 2047
    assert all(0 <= check["error"] <= check["tolerance"] for check in checks.values())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "README.md",
        "config.json",
        "generation_config.json",
        "manifest.json",
        "model.safetensors",
        "modeling_harpe.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not list(tmp_path.glob("out.*"))
    assert read_manifest(tmp_path / "out")["counts"]["checks"] == told["checks"]


def test_the_card_tells_what_it_is_how_it_was_made_and_how_well_it_does(run_dir, tmp_path, in_this_process):
    assert run(run_dir, tmp_path / "out", "--stage", "abf", "--dtype", "bf16").exit_code == 0

    card = (tmp_path / "out" / "README.md").read_text()
    _, head, text = card.split("---", 2)
    assert yaml.safe_load(head)["license"] == "mit"
    assert "base_model" not in yaml.safe_load(head), "a folder of ours is nowhere on the Hub"
    assert "context length of 2K tokens, extended from 256" in text
    assert "RoPE, base 200000" in text
    assert "| abf | 2K | " in text and "| utk | 2K | " not in text
    assert "books-2k 0.6, short 0.4" in text
    assert "| Needle recall | 2K | " in text
    assert "| Loss by position | 1K–2K | 6.21 ±" in text
    assert (run_dir / "recipe.yaml").read_text().strip() in text
    assert "| in bfloat16 | 16 | 15 | bfloat16 |" in text
    assert "vllm serve out --max-model-len 2048" in text
    assert "trust_remote_code" not in text
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_card_of_a_base_per_head_says_who_can_load_it(run_dir, tmp_path, in_this_process):
    done = run(run_dir, tmp_path / "out", "--stage", "utk")
    assert done.exit_code == 0, done.output
    assert "trust_remote_code=True" in done.stdout
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'dtype="auto", trust_remote_code=True)' in card
    assert "vLLM, SGLang and llama.cpp refuse this model" in card
    assert "vllm serve" not in card


@pytest.mark.parametrize("where", ["stages/abf", "stages/abf/model"])
def test_a_stage_is_known_by_where_it_lies(run_dir, tmp_path, where, in_this_process):
    assert run(run_dir / where, tmp_path / "out").exit_code == 0
    assert "extended from 256" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_folder_needs_no_run_and_takes_one(run_dir, tmp_path, in_this_process):
    model = save_folder(tmp_path / "model")
    assert run(model, tmp_path / "alone").exit_code == 0
    assert "See the base model." in (tmp_path / "alone" / "README.md").read_text()
    assert run(model, tmp_path / "with-run", "--run", run_dir, "--stage", "abf").exit_code == 0
    assert "## Recipe" in (tmp_path / "with-run" / "README.md").read_text()


def test_a_shipped_model_is_exported_by_its_name(tmp_path, in_this_process):
    assert run("asset:tiny-base", tmp_path / "base").exit_code == 0
    assert (tmp_path / "base" / "model.safetensors").is_file()


def test_an_earlier_export_is_replaced_and_nothing_else(run_dir, tmp_path, in_this_process):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    done = run(run_dir, tmp_path / "mine", "--stage", "utk")
    assert done.exit_code == 2
    assert "is not an export of Unspool; give a new folder" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]

    assert run(run_dir, tmp_path / "out", "--stage", "utk").exit_code == 0
    assert run(run_dir, tmp_path / "out", "--stage", "abf").exit_code == 0
    assert not (tmp_path / "out" / "modeling_harpe.py").exists()


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("abf", {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("utk", {"head_bases": [1e4, 2e5]}),
    ],
)
def test_a_wrong_base_in_the_config_is_caught_and_nothing_is_published(
    run_dir, tmp_path, stage, changes, monkeypatch, in_this_process
):
    checked = exporting.check_folder

    def after_tampering(folder: Path, *args: Any, **kwargs: Any) -> Any:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return checked(folder, *args, **kwargs)

    monkeypatch.setattr(exporting, "check_folder", after_tampering)
    done = run(run_dir, tmp_path / "out", "--stage", stage)
    assert done.exit_code == 2
    assert "not the same model in plain transformers, so nothing was published" in done.stderr
    assert not list(tmp_path.glob("out*"))


def test_what_plain_transformers_cannot_load_is_not_published(run_dir, tmp_path, monkeypatch):
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit('a file is missing')")
    monkeypatch.setattr(export, "SCRIPT", program)
    done = run(run_dir, tmp_path / "out", "--stage", "utk")
    assert done.exit_code == 2
    assert "could not be loaded in plain transformers, so nothing was published: a file is missing" in done.stderr
    assert not list(tmp_path.glob("out*"))


def test_what_is_asked_wrongly_is_one_sentence(run_dir, tmp_path):
    for words, said in (
        ((tmp_path / "nowhere", tmp_path / "out"), "does not exist; give a run's folder"),
        ((tmp_path, tmp_path / "out"), "holds no model"),
        ((run_dir, tmp_path / "out", "--stage", "utq"), "Did you mean 'utk'?"),
        ((run_dir / "stages" / "abf", tmp_path / "out", "--stage", "utk"), "is the model of stage abf"),
        ((run_dir, tmp_path / "out", "--stage", "utk", "--dtype", "bf61"), "Did you mean 'bf16'?"),
    ):
        done = run(*words)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert said in done.stderr


def test_the_other_process_refuses_to_be_anything_but_plain(tmp_path, monkeypatch, capsys):
    model = save_folder(tmp_path / "model")
    out = tmp_path / "answers.safetensors"
    request = {
        "folder": str(model),
        "remote_code": False,
        "device": "cpu",
        "text": "the",
        "passes": [],
        "out": str(out),
    }
    monkeypatch.setattr("sys.stdin", [json.dumps(request)])
    monkeypatch.setattr("sys.stdout", sys.stdout)
    plain_logits.main()
    assert "unspool is loaded, so this is not plain transformers" in json.loads(capsys.readouterr().out)["error"]
    assert not out.exists()
