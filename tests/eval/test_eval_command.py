import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from unspool.base.errors import ConfigError
from unspool.cli.eval import chosen_evals, eval_, table_row
from unspool.eval import run
from unspool.eval.config import KvEval, LossEval, NiahEval

from .oracles import Oracle

OPTIONS = {"samples": 20, "text": None, "value": None}


@pytest.fixture
def command(monkeypatch, tokenizer):
    """Runs `unspool eval`; the model is an oracle."""
    monkeypatch.setattr(run, "ModelBackend", lambda ref, *, device, dtype: Oracle(tokenizer))
    app = typer.Typer()
    app.command("eval")(eval_)
    return lambda *arguments: CliRunner().invoke(app, [*arguments], env={"COLUMNS": "120"})


@pytest.fixture
def held_out(tmp_path: Path, documents: list[str]) -> str:
    (tmp_path / "held.txt").write_text(documents[0])
    return str(tmp_path / "held.txt")


def test_options_become_the_evals_of_a_recipe():
    niah, kv, loss = chosen_evals("niah,kv,loss", "8K, 2K", samples=5, text="held.txt", value="words")

    assert isinstance(niah, NiahEval) and niah.lengths == [2048, 8192] and niah.text == "held.txt"
    assert isinstance(kv, KvEval) and kv.lengths == [2048, 8192]
    assert isinstance(loss, LossEval) and loss.length == 8192 and loss.text == "held.txt"
    assert niah.value == kv.value == "words"
    assert niah.samples == kv.samples == loss.samples == 5


def test_a_value_only_one_suite_knows_leaves_the_others_alone():
    niah, kv = chosen_evals("niah,kv", "2K", **{**OPTIONS, "value": "uuid"})

    assert (niah.value, kv.value) == ("numbers", "uuid")


@pytest.mark.parametrize(
    ("suites", "lengths", "value", "message"),
    [
        ("nih", "2K", None, "Did you mean 'niah'"),
        ("ruler", "2K", None, "'ruler' is not known"),
        ("niah", "2Q", None, "--lengths '2Q': unit 'Q' is not known"),
        ("niah", "0", None, "--lengths '0': a size must be"),
        ("niah", ",", None, "at least one suite and one length"),
        ("niah", "2K", "word", "Did you mean 'words'"),
        ("niah,loss", "2K", "uuid", "--value uuid is for kv; the suites here are niah,loss"),
    ],
)
def test_wrong_options_are_explained(suites, lengths, value, message):
    with pytest.raises(ConfigError, match=message):
        chosen_evals(suites, lengths, **{**OPTIONS, "value": value})


def test_the_table_shows_every_cell_with_n_and_interval(command, held_out):
    shown = command("M", "--lengths", "256,512", "--samples", "5", "--value", "words", "--text", held_out)

    assert shown.exit_code == 0, shown.output
    rows = [line.replace("│", " ").split() for line in shown.stdout.splitlines()]
    assert ["niah", "256", "all", "100%", "57%", "to", "100%", "5"] in rows
    assert ["kv", "512", "all", "100%", "57%", "to", "100%", "5"] in rows
    assert any(row[:4] == ["loss", "512", "0–64", "32.000"] for row in rows)


def test_json_is_the_summary_and_nothing_else(command, held_out, tmp_path):
    out = tmp_path / "scores"
    arguments = ("M", "--suite", "kv", "--lengths", "256", "--value", "words", "--json", "--out", str(out))
    shown = command(*arguments)

    assert json.loads(shown.stdout) == json.loads((out / "summary.json").read_text())
    assert command(*arguments).stdout == shown.stdout


def test_a_folder_with_other_files_is_not_replaced(command, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")

    shown = command("M", "--suite", "kv", "--lengths", "256", "--value", "words", "--out", str(tmp_path))

    assert isinstance(shown.exception, ConfigError)
    assert "holds no scores" in str(shown.exception)
    assert (tmp_path / "thesis.tex").exists()


def test_an_unknown_device_is_refused(command):
    shown = command("M", "--suite", "kv", "--lengths", "256", "--device", "tpu")

    assert isinstance(shown.exception, ConfigError)
    assert "use auto, cpu, cuda" in str(shown.exception)


def test_help_teaches_with_examples(command):
    shown = command("--help")

    assert shown.exit_code == 0
    assert "unspool eval MODEL --suite niah --lengths 256,1K,2K --value words" in shown.stdout


def test_what_was_not_scored_shows_as_a_dash():
    cell = {"suite": "niah", "metric": "accuracy", "length": 2048, "depth": 0.25}

    row = table_row({**cell, "value": None, "n": 0, "low": None, "high": None})

    assert row == ("niah", "2K", "depth 0.25", "–", "–", "0")
