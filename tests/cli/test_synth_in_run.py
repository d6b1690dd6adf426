"""A recipe whose sources read what its own `synth` makes: one command goes from documents to rows and weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from factory import SMALL_SIZE
from synthesis.toy import MOCK, write_documents, write_recipe
from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.data.packing.store import open_rows
from unspool.models.config import SIZES
from unspool.studies.load import check_study_inputs, load_study

STAGE = {"name": "sft", "context_length": 512, "mix": {"talks": 1}, "tokens": 1024, "batch_tokens": 512, "lr": 1e-3}


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "4M", SMALL_SIZE)
        yield


def invoke(*args: str) -> Result:
    return CliRunner().invoke(build_app(), list(args))


def recipe_in(folder: Path, *, kind: str = "chat", path: str = "synth:long", **more: Any) -> Path:
    write_documents(folder / "docs.jsonl", 20)
    written = write_recipe(folder, {"generator": MOCK, "tokens": 6000})
    recipe = json.loads(written.read_text())
    recipe["sources"]["talks"] = {"kind": kind, "path": path} | ({"template": "plain.jinja"} if kind == "chat" else {})
    recipe |= {
        "datasets": {"talks": {"from": "talks", "seq_len": 512, "packing": "best_fit"}},
        "stages": [STAGE],
        "device": "cpu",
    } | more
    written.write_text(json.dumps(recipe))
    return written


def test_one_command_generates_packs_and_trains_and_does_it_once(tmp_path):
    recipe = recipe_in(tmp_path)
    done = invoke("run", str(recipe))
    assert done.exit_code == 0, done.output
    out = tmp_path / "run"
    assert (out / "synth/long/manifest.json").is_file()
    assert any(row.loss_mask is not None and row.loss_mask.any() for row in open_rows(out / "datasets/talks"))
    assert (out / "stages/sft/model/model.safetensors").is_file()

    replies = (out / "replies/synth.jsonl").read_bytes()
    again = invoke("run", str(recipe))
    assert again.exit_code == 0, again.output
    assert "synth long: up to date" in again.output
    assert (out / "replies/synth.jsonl").read_bytes() == replies


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"path": "synth:lnog"}, "'lnog' is not a set of `synth`; did you mean 'long'? Sets in this recipe: long."),
        ({"kind": "jsonl"}, "only sources of kind: chat can read the conversations of `synth`."),
    ],
)
def test_a_source_that_cannot_be_made_so_is_refused_before_any_work(changes, sentence, tmp_path):
    done = invoke("pack", str(recipe_in(tmp_path, **changes)))
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()


def test_a_study_does_not_generate_for_every_arm(tmp_path):
    recipe_in(tmp_path, evals=[{"suite": "niah", "lengths": [512]}])
    (tmp_path / "study.yaml").write_text("name: rates\nrecipe: recipe.yaml\narms: {a: , b: }\n")
    with pytest.raises(ConfigError, match="synth:long would be generated again for each arm"):
        check_study_inputs(load_study(tmp_path / "study.yaml").runs)
