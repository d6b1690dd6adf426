import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from unspool.cli.report import report
from unspool.core.errors import ConfigError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(report)
    return app


def test_one_run_gets_its_page_in_its_folder_and_the_headline_is_printed(fake_run: Path, app: typer.Typer):
    result = CliRunner().invoke(app, [str(fake_run)])

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tiny: 256 → 2K. Needle recall at 2K: 0%")
    assert lines[-1] == f"Report: {fake_run / 'report.html'}"
    assert (fake_run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_several_runs_write_here(fake_run: Path, app: typer.Typer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(fake_run.parent)
    result = CliRunner().invoke(app, ["tiny", "tiny"])

    assert result.exit_code == 0
    assert (fake_run.parent / "report.html").is_file()


def test_out_names_the_file(fake_run: Path, app: typer.Typer):
    out = fake_run.parent / "pages" / "mine.html"

    assert CliRunner().invoke(app, [str(fake_run), "--out", str(out)]).exit_code == 0
    assert out.is_file()


def test_json_holds_the_cells_under_their_names_and_writes_no_page(fake_run: Path, app: typer.Typer):
    result = CliRunner().invoke(app, [str(fake_run), "--json"])

    (run,) = json.loads(result.stdout)["runs"]
    summary = json.loads((fake_run / "scores" / "utk" / "summary.json").read_text())
    assert (run["models"][2]["model"], run["models"][2]["cells"]) == ("utk", summary["cells"])
    assert len(run["headline"]) == 3
    assert not (fake_run / "report.html").exists()


def test_markdown_is_written_next_to_the_page_and_both_are_named(fake_run: Path, app: typer.Typer):
    out = fake_run.parent / "deep" / "mine.md"
    result = CliRunner().invoke(app, [str(fake_run), "--markdown", str(out)])

    assert result.stdout.splitlines()[-2:] == [f"Report: {fake_run / 'report.html'}", f"Markdown: {out}"]
    assert out.read_text(encoding="utf-8").startswith("# tiny\n")


@pytest.mark.parametrize("option", ["--out", "--markdown"])
def test_a_folder_to_write_to_is_refused_before_anything_is_written(fake_run: Path, app: typer.Typer, option: str):
    result = CliRunner().invoke(app, [str(fake_run), option, str(fake_run.parent)])

    assert isinstance(result.exception, ConfigError)
    assert "is a folder. Name the file to write" in str(result.exception)
    assert not (fake_run / "report.html").exists()


def test_a_folder_that_is_no_run_is_an_error_of_the_user(tmp_path: Path, app: typer.Typer):
    result = CliRunner().invoke(app, [str(tmp_path)])

    assert isinstance(result.exception, ConfigError)


def test_lengths_beyond_the_context_are_marked(fake_run: Path, app: typer.Typer):
    path = fake_run / "scores" / "utk" / "summary.json"
    summary = json.loads(path.read_text())
    for cell in summary["cells"]:
        if (cell["suite"], cell["length"]) == ("niah", 2048):
            cell["beyond_context"] = "ask"
    path.write_text(json.dumps(summary))

    assert CliRunner().invoke(app, [str(fake_run)]).exit_code == 0
    shown = CliRunner().invoke(app, [str(fake_run), "--json"])

    page = (fake_run / "report.html").read_text(encoding="utf-8")
    assert "% †" in page and "beyond the model&#39;s context, run anyway" in page
    (run,) = json.loads(shown.stdout)["runs"]
    marked = {(c["suite"], c["length"]) for c in run["models"][2]["cells"] if c.get("beyond_context") == "ask"}
    assert marked == {("niah", 2048)}
