import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unspool.cli.eval import _names
from unspool.cli.main import build_app
from unspool.core.errors import ConfigError
from unspool.evals import suites
from unspool.evals.backends import mock, transformers
from unspool.evals.eval_request import chosen_evals
from unspool.evals.suites.key_value import KeyValueEval
from unspool.evals.suites.niah import NiahEval
from unspool.evals.suites.perplexity import PerplexityEval
from unspool.evals.suites.ruler import RulerEval
from unspool.models import tokenizer as model_tokenizer
from unspool.reporting.score_tables import table_row

from .oracles import Oracle
from .toy import TOY

OPTIONS = {"samples": 20, "text": None, "value": None}


@pytest.fixture
def command(monkeypatch, tokenizer):
    """Runs `unspool eval`; the model is an oracle."""
    monkeypatch.setattr(transformers, "ModelBackend", lambda ref, *, device, dtype, rope: Oracle(tokenizer))
    monkeypatch.setattr(model_tokenizer, "load_tokenizer", lambda ref: tokenizer)
    return lambda *arguments: CliRunner().invoke(build_app(), ["eval", *arguments], env={"COLUMNS": "120"})


@pytest.fixture
def held_out(tmp_path: Path, documents: list[str]) -> str:
    (tmp_path / "held.txt").write_text(documents[0])
    return str(tmp_path / "held.txt")


def test_options_become_the_evals_of_a_recipe():
    niah, kv, loss = chosen_evals(
        ["niah", "key_value", "perplexity"], ["8K", "2K"], samples=5, text="held.txt", value="words"
    )

    assert isinstance(niah, NiahEval) and niah.lengths == [2048, 8192] and niah.text == "held.txt"
    assert isinstance(kv, KeyValueEval) and kv.lengths == [2048, 8192]
    assert isinstance(loss, PerplexityEval) and loss.length == 8192 and loss.text == "held.txt"
    assert niah.value == kv.value == "words"
    assert niah.samples == kv.samples == loss.samples == 5


def test_a_value_only_one_suite_knows_leaves_the_others_alone():
    niah, kv = chosen_evals(["niah", "key_value"], ["2K"], **{**OPTIONS, "value": "uuid"})

    assert (niah.value, kv.value) == ("numbers", "uuid")


@pytest.mark.parametrize(
    ("suites", "lengths", "value", "message"),
    [
        ("nih", "2K", None, "Did you mean 'niah'"),
        ("rulers", "2K", None, "Did you mean 'ruler'"),
        ("niah", "2Q", None, "`lengths` '2Q': unit 'Q' is not known"),
        ("niah", "0", None, "`lengths` '0': a size must be"),
        ("niah", ",", None, "at least one suite and one length"),
        ("niah", "2K", "word", "Did you mean 'words'"),
        ("niah,perplexity", "2K", "uuid", "`value='uuid'` works only with key_value, not with niah, perplexity"),
    ],
)
def test_wrong_options_are_explained(suites, lengths, value, message):
    with pytest.raises(ConfigError, match=message):
        chosen_evals(_names(suites), _names(lengths), **{**OPTIONS, "value": value})


def test_the_table_shows_every_cell_with_n_and_interval(command, held_out):
    shown = command("M", "--lengths", "256,512", "--samples", "5", "--value", "words", "--text", held_out)

    assert shown.exit_code == 0, shown.output
    rows = [line.replace("│", " ").split() for line in shown.stdout.splitlines()]
    assert ["niah", "256", "all", "100%", "57%", "to", "100%", "5"] in rows
    assert ["key_value", "512", "all", "100%", "57%", "to", "100%", "5"] in rows
    assert any(row[:4] == ["perplexity", "512", "0–64", "32.000"] for row in rows)


def test_json_is_the_summary_and_nothing_else(command, held_out, tmp_path):
    out = tmp_path / "scores"
    arguments = ("M", "--suite", "key_value", "--lengths", "256", "--value", "words", "--json", "--out", str(out))
    shown = command(*arguments)

    assert json.loads(shown.stdout) == json.loads((out / "summary.json").read_text())
    assert command(*arguments).stdout == shown.stdout


def test_a_folder_with_other_files_is_not_replaced(command, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")

    shown = command("M", "--suite", "key_value", "--lengths", "256", "--value", "words", "--out", str(tmp_path))

    assert shown.exit_code == 2 and "is not a folder of scores" in shown.stderr
    assert (tmp_path / "thesis.tex").exists()


def test_an_unknown_device_is_refused(command):
    shown = command("M", "--suite", "key_value", "--lengths", "256", "--device", "tpu")

    assert shown.exit_code == 2 and "use auto, cpu, cuda" in shown.stderr


def test_help_teaches_with_examples(command):
    shown = command("--help")

    assert shown.exit_code == 0
    assert "unspool eval MODEL --suite niah --lengths 256,1K,2K --value words" in shown.stdout


def test_what_was_not_scored_shows_as_a_dash():
    cell = {"suite": "niah", "metric": "accuracy", "length": 2048, "depth": 0.25}

    row = table_row({**cell, "value": None, "n": 0, "low": None, "high": None})

    assert row == ("niah", "2K", "depth 0.25", "–", "–", "0")


def test_options_of_suites_with_tasks_reach_them():
    options = {"tasks": ["lone"], "mode": "reference", "chat": "off", "paths": {"haystack": "x.txt"}}
    [niah, ruler] = chosen_evals(["niah", "ruler"], ["2K"], **OPTIONS, **options)

    assert isinstance(ruler, RulerEval) and isinstance(niah, NiahEval)
    assert (ruler.tasks, ruler.mode, ruler.chat, ruler.paths) == (["lone"], "reference", "off", {"haystack": "x.txt"})


def test_a_suite_with_tasks_is_run_and_shown(command, monkeypatch):
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)
    arguments = ("M", "--suite", "ruler", "--lengths", "256", "--samples", "6")
    shown = command(*arguments, "--backend", "oracle")

    assert shown.exit_code == 0, shown.output
    rows = [line.replace("│", " ").split() for line in shown.stdout.splitlines()]
    assert ["ruler", "256", "mean", "of", "3", "tasks", "of", "4", "100%", "77%", "to", "100%", "18"] in rows
    assert ["ruler", "256", "judged", "(judge)", "not", "judged", "–", "0"] in rows
    assert "effective length 256" in shown.stdout
    assert "0%" in command(*arguments, "--backend", "empty", "--tasks", "lone").stdout


def test_adversarial_answers_reach_no_terminal(command, monkeypatch):
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)
    shown = command(
        "M", "--suite", "ruler", "--lengths", "256", "--samples", "3", "--backend", "adversarial", "--parity"
    )

    assert shown.exit_code == 1
    assert "First difference: ruler lone 256, question 0, character 0" in shown.stdout
    assert "\x1b" not in shown.stdout and "\x00" not in shown.stdout


def test_parity_of_equal_backends_passes(command, monkeypatch, tokenizer):
    monkeypatch.setitem(suites.SUITES, "ruler", TOY)
    monkeypatch.setattr(transformers, "ModelBackend", lambda ref, *, device, dtype, rope: mock.Oracle(tokenizer))
    shown = command("M", "--suite", "ruler", "--lengths", "256", "--backend", "oracle", "--parity", "--json")

    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == {"n": 20, "equal": 20, "differences": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "llama"), r"--backend 'llama' is not known\..* Known: adversarial, empty, openai"),
        (("--backend", "openai"), "needs the server's address"),
        (("--url", "http://x"), "--url works only with --backend openai"),
        (("--suite", "ruler", "--mode", "exact"), "--mode 'exact' is not known; use fixed, reference"),
        (("--suite", "ruler", "--chat", "yes"), "--chat 'yes' is not known; use auto, on, off"),
        (("--suite", "ruler", "--path", "x.txt"), "write NAME=PATH"),
        (("--suite", "ruler,helmet", "--tasks", "vt"), "--tasks needs exactly one suite"),
        (("--suite", "niah", "--tasks", "vt"), "--tasks needs exactly one suite"),
        (
            ("--suite", "ruler,helmet", "--wording", "w.yaml"),
            "--wording needs exactly one suite, one of: ruler, helmet, lveval",
        ),
        (("--suite", "nocha", "--wording", "w.yaml"), "--wording needs exactly one suite"),
        (("--suite", "ruler", "--wording", "w.yaml"), "wording w.yaml: no such file"),
        (("--suite", "short"), r"pip install 'unspool\[eval\]'"),
    ],
)
def test_options_that_do_not_fit_are_explained(command, arguments, message):
    shown = command("M", "--lengths", "256", *arguments)

    assert shown.exit_code == 2
    assert re.search(message, shown.stderr), shown.stderr


def test_a_shipped_model_is_named_as_in_a_recipe(monkeypatch):
    asked = []

    def no_model(options):
        asked.append(options)
        raise ConfigError("far enough")

    monkeypatch.setattr("unspool.reporting.evaluate.build_backend", no_model)
    app = build_app()
    run = CliRunner().invoke

    run(app, ["eval", "asset:tiny-base", "--suite", "key_value", "--lengths", "256"])
    wrong = run(app, ["eval", "asset:tiny-bace", "--suite", "key_value", "--lengths", "256"])

    assert (Path(asked[0].model) / "config.json").is_file() and len(asked) == 1
    assert "did you mean 'asset:tiny-base'?" in wrong.stderr


def test_means_and_categories_are_shown_below_the_table(command, monkeypatch, tmp_path):
    toy = replace(TOY, categories={"first": ("lone", "shared"), "second": ("judged",)})
    monkeypatch.setitem(suites.SUITES, "ruler", toy)
    arguments = ("M", "--suite", "ruler", "--lengths", "256,512", "--samples", "6", "--backend", "oracle")
    shown = command(*arguments)

    rows = [" ".join(line.replace("│", " ").split()) for line in shown.stdout.splitlines()]
    assert "mean of 3 tasks of 4 100.0% (77–100, n 18) 100.0% (77–100, n 18)" in rows
    assert "first, 2 tasks 100.0% (72–100, n 12) 100.0% (72–100, n 12)" in rows
    assert "second, 0 tasks of 1 – –" in rows
    assert "overall, mean of 2 categories – (1 of 2 known) – (1 of 2 known)" in rows
    told = json.loads(command(*arguments, "--json").stdout)["suites"][0]
    assert {one["name"] for one in told["means"]} == {"mean", "first", "second", "overall"}
