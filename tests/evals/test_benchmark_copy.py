"""The setting `reference`: how it is checked, and what results say about published numbers."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.evals.suites import SUITES
from unspool.reporting.gather_scores import gather_model
from unspool.reporting.page import write_report

MOCK = (
    "asset:tiny-base",
    "--backend",
    "oracle",
    "--suite",
    "ruler",
    "--tasks",
    "vt",
    "--lengths",
    "1K",
    "--samples",
    "1",
)


@pytest.fixture
def command():
    return lambda *arguments: CliRunner().invoke(build_app(), ["eval", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*MOCK, "--reference", "nowhere"),
            "reference nowhere: no such file or folder; pass your clone",
        ),
        ((*MOCK, "--reference", ".", "--mode", "fixed"), "remove mode, or set mode: reference"),
        ((*MOCK, "--reference", ".", "--wording", "w.yaml"), "reference and wording both set the wording"),
        (
            ("m", "--suite", "niah", "--reference", "."),
            "--reference needs exactly one suite, one of: ruler, ",
        ),
        (("m", "--suite", "ruler,helmet", "--reference", "."), "--reference needs exactly one suite"),
        (("m", "--suite", "short", "--reference", "."), "--reference has no effect on --suite short"),
        (("m", "--reference", "."), "--reference"),
    ],
)
def test_invalid_references_are_refused_in_one_sentence(command, arguments, message):
    result = command(*arguments)

    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.count("error: ") == 1


def test_table_summary_and_report_say_that_our_own_words_are_not_comparable(command, tmp_path: Path):
    said = "not comparable with published numbers: wording and data are not the benchmark's"
    result = command(*MOCK, "--samples", "1", "--out", str(tmp_path / "scores"))

    assert f"ruler: {said}; set reference to use its own" in result.stdout
    (suite,) = json.loads((tmp_path / "scores" / "summary.json").read_text())["suites"]
    assert suite["comparable"] is False and suite["comparability"].startswith(said)
    assert gather_model(tmp_path / "scores").comparability == {"ruler": suite["comparability"]}
    write_report([tmp_path / "scores"], tmp_path / "report.html")
    assert "Not comparable with published numbers" in (tmp_path / "report.html").read_text()


def test_a_reference_decides_the_mode():
    entry = {"suite": "ruler", "lengths": [1024]}

    assert SUITES["ruler"].config.model_validate(entry).mode == "fixed"
    assert SUITES["ruler"].config.model_validate({**entry, "reference": "clone"}).mode == "reference"
    with pytest.raises(ValidationError, match="remove mode"):
        SUITES["ruler"].config.model_validate({**entry, "reference": "clone", "mode": "fixed"})
