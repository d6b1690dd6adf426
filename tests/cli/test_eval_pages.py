"""From `unspool eval` to a page: --html, the folder of --out in `unspool report`, and what is said at the end."""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from unspool.cli.main import build_app
from unspool.core.artifacts import MANIFEST, seal
from unspool.core.stats import score_interval

EVAL = ("eval", "asset:tiny-base", "--suite", "niah", "--lengths", "256", "--value", "words", "--device", "cpu")


def run(*words: Any, code: int = 0) -> Any:
    done = CliRunner().invoke(build_app(), [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_eval_says_where_its_results_are_and_report_reads_them(here):
    done = run(*EVAL, "--samples", 8, "--backend", "oracle", "--out", "scores/my run")
    assert "results: scores/my run; see them with: unspool report 'scores/my run'\n" in done.stderr

    done = run("report", "scores/my run")

    assert done.stdout.splitlines() == [
        "my run. Needle recall at 256: tiny-base 100% (68–100), n = 8.",
        "Report: scores/my run/report.html",
    ]
    page = (here / "scores" / "my run" / "report.html").read_text()
    assert "tiny-base" in page
    assert "No recipe.yaml" not in page
    # The page does not make the scores stale.
    assert "up to date" in run(*EVAL, "--samples", 8, "--backend", "oracle", "--out", "scores/my run").stderr


@pytest.mark.parametrize(("given", "written"), [("page.html", "page.html"), ("pages", "pages/report.html")])
@pytest.mark.parametrize("out", [None, "scores"])
def test_html_writes_the_page_at_once(here, given, written, out):
    done = run(*EVAL, "--samples", 2, "--backend", "oracle", "--html", given, *([] if out is None else ["--out", out]))

    assert f"page: {written}\n" in done.stderr
    assert "Needle recall at 256" in (here / written).read_text()
    assert ("results: scores\n" in done.stderr) == (out is not None)
    assert (here / "scores").exists() == (out is not None)


def test_without_out_and_html_eval_says_that_nothing_is_kept(here):
    done = run(*EVAL, "--samples", 1, "--backend", "oracle", "--json")
    assert json.loads(done.stdout)["model"] == "tiny-base"
    assert "results were not kept; --out FOLDER keeps answers and scores, --html PAGE writes a page\n" in done.stderr


def test_a_wrong_page_is_refused_before_the_first_question(here):
    (here / "a.html").mkdir()
    (here / "a.html" / "report.html").mkdir()
    for given, said in {
        "page.txt": "error: --html page.txt: a page ends in .html; use page.html, or a folder.\n",
        "a.html": "error: --html a.html/report.html is a folder; name another file.\n",
    }.items():
        assert run(*EVAL, "--backend", "oracle", "--html", given, "--out", "scores", code=2).stderr == said
    assert run(*EVAL, "--html", "x.html", "--lm-eval", "tasks", code=2).stderr.startswith("error: --html cannot be")
    assert run(*EVAL, "--html", "x.html", "--parity", code=2).stderr.startswith("error: --html cannot be")
    assert not (here / "scores").exists()


def write_scores(folder: Path, scores: list[float]) -> None:
    """A folder as `eval --out` writes it."""
    asked = {"suite": "niah", "length": 256, "depth": 0.5, "reference": "x", "output": "y"}
    samples = [asked | {"index": at, "hash": str(at), "score": score} for at, score in enumerate(scores)]
    low, high = score_interval(scores)
    cell = {"suite": "niah", "metric": "accuracy", "length": 256, "value": fmean(scores), "n": len(scores)}
    draft = folder.with_suffix(".partial")
    draft.mkdir()
    (draft / "summary.json").write_text(json.dumps({"model": "m", "cells": [cell | {"low": low, "high": high}]}))
    (draft / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    seal(draft, folder, kind="scores", inputs={}, settings={}, counts={})


# Wrong and right answers, then graded ones: a bootstrap of equal differences has no width.
@pytest.mark.parametrize("scores", [((0.0, 0.0), (1.0, 1.0)), ((0.1, 0.2), (0.8, 0.9))])
@pytest.mark.parametrize(("n", "is_shown"), [(2, False), (3, False), (5, False), (8, True)])
def test_several_folders_are_compared_and_a_few_questions_declare_no_winner(here, scores, n, is_shown):
    for name, pair in zip(("bad", "good"), scores, strict=True):
        write_scores(here / name, [pair[at % 2] for at in range(n)])

    done = run("report", "bad", "good", "--out", "both.html", "--markdown", "both.md")

    compared = [line for line in done.stdout.splitlines() if "→" in line]
    assert len(compared) == 1
    assert compared[0].startswith("bad · m → good · m, needle recall at 256: +")
    assert compared[0].endswith(f"good · m is better (n = {n})" if is_shown else f"no difference shown (n = {n})")
    # Neither the tables' bold nor the tooltips say more than the sentence does.
    page, markdown = (here / "both.html").read_text(), (here / "both.md").read_text()
    assert ("m is better" in page) == is_shown
    assert bool(re.search(r"good · m \| \*\*", markdown)) == is_shown


def test_a_folder_without_scores_is_refused_with_what_is_missing(here):
    (here / "empty").mkdir()
    (here / "begun").mkdir()
    (here / "begun.work").mkdir()
    assert "empty is not a run: it has none of recipe.yaml, run.json, scores, stages, summary.json. Give the " in (
        run("report", "empty", code=2).stderr
    )
    assert "begun has no scores yet: begun.work is unfinished; run the same `unspool eval` command again" in (
        run("report", "begun", code=2).stderr
    )
    assert not (here / MANIFEST).exists()


def test_a_suite_without_an_effective_length_says_with_what_its_scores_compare(here):
    longppl = ("--suite", "longppl", "--lengths", 512, "--set", "short_context=64", "--samples", 1, "--device", "cpu")
    done = run("eval", "asset:tiny-base", *longppl, "--out", "one")
    assert "not comparable with other models" in " ".join(done.stdout.split())
    done = run("eval", "asset:tiny-base", *longppl, "--set", "key_tokens=one", "--out", "two")
    assert "key tokens of one: comparable" in " ".join(done.stdout.split())
