"""The verbs that make things: `run`, `corpus`, `rows`, `train`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from factory import SMALL_SIZE, save_folder, save_mini
from unspool.cli.main import build_app
from unspool.models.config import SIZES


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "4M", SMALL_SIZE)
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return save_mini(tmp_path_factory.mktemp("mini"))


@pytest.fixture(scope="module")
def finished(recipe) -> tuple[Path, Result]:
    out = recipe.parent / "out"
    return out, invoke("run", str(recipe), "--set", f"out={out}")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(build_app(), list(args))


def test_a_recipe_runs_from_text_to_report(finished):
    out, result = finished

    assert result.exit_code == 0, result.output
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    lines = result.stdout.strip().splitlines()
    assert lines[0].startswith("mini: 64 → 128.")
    assert lines[-1] == f"report: {out / 'report.html'}"
    assert "stage abf: 2 steps" in result.stderr
    assert "stage" not in lines[-1], "progress belongs on stderr"


def test_a_second_run_says_up_to_date_for_everything_and_prints_json_alone(recipe, finished):
    out, _ = finished

    result = invoke("run", str(recipe), "--set", f"out={out}", "--json")

    assert result.exit_code == 0
    assert json.loads(result.stdout)["report"] == str(out / "report.html")
    assert json.loads(result.stdout)["headline"][0].startswith("mini: 64 → 128.")
    *told, last = result.stderr.splitlines()[1:]
    assert all(line.endswith("up to date") for line in told)
    assert last.startswith("mini: finished in ") and "(start-up " in last
    assert len(told) == 9


@pytest.mark.parametrize(("verb", "made"), [("tokenize", ["corpus"]), ("pack", ["corpus", "datasets"])])
def test_the_first_boxes_can_be_made_alone_and_counted(verb, made, recipe, tmp_path):
    out = tmp_path / "out"

    result = invoke(verb, str(recipe), "--set", f"out={out}", "--json")

    assert result.exit_code == 0
    counts = json.loads(result.stdout)
    assert (counts["books"]["documents"] == 20) if verb == "tokenize" else (counts["long"]["rows"] > 10)
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == made
    again = invoke(verb, str(recipe), "--set", f"out={out}")
    assert all(name in again.stdout for name in counts)
    assert ("records" if verb == "tokenize" else "tokens in") in again.stdout


def test_the_shares_of_a_mixed_dataset_are_printed_by_pack_and_inspect(recipe, tmp_path):
    out = tmp_path / "out"
    changes = ["sources.notes={kind: jsonl, path: held-out.jsonl}", f"out={out}"]
    changes.append("datasets.mixed={from: {books: 0.75, notes: 0.25}, seq_len: 128, packing: truncate}")
    overrides = [part for change in changes for part in ("--set", change)]

    packed = invoke("pack", str(recipe), *overrides)
    shown = invoke("inspect", str(out / "datasets/mixed"))

    assert packed.exit_code == 0, packed.output
    (line,) = [line for line in packed.stdout.splitlines() if line.split()[:2] == ["mixed", "notes"]]
    assert re.search(r"25\.00%\s+2[45]\.\d\d%$", line.rstrip()), line
    assert "shares of trained tokens: books 7" in packed.stderr
    assert shown.exit_code == 0 and "(requested 25.00%)" in " ".join(shown.stdout.split()), shown.output


def test_stages_can_be_trained_alone(recipe, tmp_path):
    out = tmp_path / "out"

    result = invoke("train", str(recipe), "--stage", "first", "--set", f"out={out}")

    assert result.exit_code == 0
    assert result.stdout.strip() == str(out / "stages" / "first" / "model")
    assert sorted(path.name for path in (out / "stages").iterdir()) == ["first"]
    assert not (out / "scores").exists()
    assert not (out / "report.html").exists()


# Errors: one sentence, exit code 2, nothing written


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--set", "sources.books.path=none.jsonl"], "sources.books.path = none.jsonl: no such file or folder"),
        (["--set", "model.tokenizer=./none"], "model.tokenizer = ./none: no such file or folder"),
        (["--set", "evals.0.text=none.jsonl"], "evals.0.text = none.jsonl: no such file or folder"),
        (["--set", "engine.kind=slurm"], "use kind: local"),
        (["--set", "stages.0.batch_tokens=100"], "batch_tokens must be a multiple of context_length"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "train"])
def test_what_cannot_be_run_is_one_sentence_and_nothing_is_written(verb, args, wanted, recipe, tmp_path):
    out = tmp_path / "out"

    result = invoke(verb, str(recipe), "--set", f"out={out}", *args)

    assert result.exit_code == 2
    assert wanted in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""
    assert not out.exists()


def test_a_model_without_rotary_positions_is_one_sentence_and_nothing_is_written(recipe, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = save_folder(tmp_path / "gpt2", GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2)))
    out = tmp_path / "out"

    result = invoke("run", str(recipe), "--set", f"out={out}", "--set", f"model={model}")

    assert result.exit_code == 2
    assert "no rotary positions" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not out.exists()


def test_an_unknown_stage_names_the_nearest(recipe, tmp_path):
    result = invoke("train", str(recipe), "--stage", "fist", "--set", f"out={tmp_path / 'out'}")

    assert result.exit_code == 2
    assert result.stderr == "error: stage 'fist' is not known. Did you mean 'first'? Known: abf, first, utk.\n"


def test_a_stage_whose_start_is_missing_is_one_sentence(recipe, tmp_path):
    result = invoke("train", str(recipe), "--stage", "abf", "--set", f"out={tmp_path / 'out'}")

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "error: stage abf starts from stage first, which is not trained yet; train it first."
    )


def test_a_file_where_the_run_should_go_is_named(recipe, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("run", str(recipe), "--set", f"out={tmp_path / 'file' / 'run'}")
    assert result.exit_code == 2
    wanted = f"error: out {tmp_path}/file/run: {tmp_path}/file is a file, not a folder; use another path.\n"
    assert result.stderr.endswith(wanted)
