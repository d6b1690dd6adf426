"""The command: its table, its JSON, its exit codes, and the page about it."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unspool.training.batch
from unspool.cli.main import build_app
from unspool.verification.fixtures import FAMILIES
from unspool.verification.run import PROMISES, Result, build_checks, reasons, summary_line, table_rows

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "how-to" / "verify-your-machine.md"
QUICK = ("verify", "--device", "cpu", "--model", "llama", "--only", "packing")


def run(*args: str):
    return CliRunner().invoke(build_app(), list(args))


def result(**changes) -> Result:
    plain = {
        "promise": 1,
        "check": "packing",
        "quantity": "loss",
        "model": "llama",
        "device": "cpu",
        "dtype": "fp32",
        "error": 1e-7,
        "tolerance": 1e-5,
        "status": "passed",
        "seconds": 0.5,
        "detail": "",
    }
    return Result(**plain | changes)


def test_kept_promises_end_with_0_and_a_table():
    done = run(*QUICK)
    assert done.exit_code == 0, done.output
    assert "packing loss" in done.stdout
    assert "3 passed" in done.stdout


def test_a_broken_promise_ends_with_1_and_names_what_failed(monkeypatch):
    monkeypatch.setattr(
        unspool.training.batch, "position_ids", lambda lens: unspool.training.batch.np.arange(lens.sum())
    )
    done = run(*QUICK)
    assert done.exit_code == 1
    assert "2 passed, 1 failed" in done.stdout


def test_json_holds_every_number():
    done = run(*QUICK, "--json")
    found = json.loads(done.stdout)
    assert [one["quantity"] for one in found] == ["loss", "gradient", "positions"]
    assert all(one["error"] <= one["tolerance"] and one["status"] == "passed" for one in found)


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (("--device", "tpu"), "--device 'tpu' is not known; use auto, cpu, cuda."),
        (("--only", "pakcing"), "--only 'pakcing' is not known. Did you mean 'packing'?"),
        (("--model", "no/such/folder/model.gguf", "--device", "cpu"), "no/such/folder/model.gguf"),
    ],
)
def test_a_mistake_of_the_user_ends_with_2_and_one_line(args, wanted):
    done = run("verify", *args)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert wanted in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_list_shows_every_check_and_every_model_and_runs_nothing():
    done = run("verify", "--list")
    assert done.exit_code == 0
    for name in [*build_checks(None), *FAMILIES]:
        assert name in done.stdout


# The table


def test_the_table_shows_the_model_that_came_nearest_to_its_tolerance():
    (row,) = table_rows([result(), result(model="qwen2", error=2e-7), result(model="olmo2", error=0.0)], each=False)
    assert row == ("1", "packing loss", "qwen2", "cpu fp32", "2.0e-07", "1.0e-05", "passed", "1.5")


def test_every_failure_has_its_own_row():
    rows = table_rows([result(), result(model="qwen2", status="failed", error=float("nan"))], each=False)
    assert [(row[2], row[6]) for row in rows] == [("llama", "passed"), ("qwen2", "failed")]


def test_each_gives_every_model_its_line():
    rows = table_rows([result(), result(model="qwen2"), result(model="x", status="skipped", error=None)], each=True)
    assert [row[2] for row in rows] == ["llama", "qwen2", "x"]


def test_each_reason_is_printed_once_with_its_models_and_checks():
    skipped = {"status": "skipped", "error": None, "tolerance": None, "quantity": "", "detail": "not here"}
    results = [result(model=model, check=check, **skipped) for model in "ab" for check in ("packing", "isolation")]
    assert reasons(results) == ["skipped: packing, isolation on a, b: not here"]
    assert summary_line([*results, result()]) == "1 passed, 4 skipped"


# The pages


def test_the_example_on_the_page_shows_checks_that_exist_as_passed():
    shown = re.findall(r"^(\d) +([\w-]+) .* passed +[\d.]+$", PAGE.read_text(), re.MULTILINE)
    checks = build_checks(None)
    assert len(shown) >= 4
    assert [(int(promise), name) for promise, name in shown if checks[name].promise != int(promise)] == []


def test_the_page_about_exactness_has_every_promise():
    text = (DOCS / "concepts" / "exactness.md").read_text()
    assert {int(number) for number in re.findall(r"^(\d)\. ", text, re.MULTILINE)} == set(PROMISES)
