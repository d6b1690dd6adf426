"""Suites that consist of tasks, on the page."""

import json
from pathlib import Path

import pytest

from unspool.reporting.comparisons import headline
from unspool.reporting.gather import gather
from unspool.reporting.page import write_report

NUMBERS = {"n": 4, "low": 0.3, "high": 0.9, "mode": "fixed"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "scores" / "base"
    folder.mkdir(parents=True)
    cells = []
    for length in (4096, 8192):
        here = {"suite": "ruler", "length": length, **NUMBERS}
        cells.append({**here, "task": None, "metric": "mean", "depth": None, "value": 0.75})
        for depth in (None, 0.0, 1.0):
            cells.append({**here, "task": "vt", "metric": "recall", "depth": depth, "value": 0.5})
        none = {"value": None, "n": 0, "low": None, "high": None}
        cells.append({**here, "task": "essay", "metric": "judge", "depth": None, **none})
    (folder / "summary.json").write_text(json.dumps({"model": "base", "cells": cells}))
    sample = {"suite": "ruler", "task": "vt", "length": 8192, "depth": 0.0, "index": 0, "hash": "h", "score": 0.0}
    sample |= {"reference": "ABCDE", "output": "\x1b[2J<script>alert(1)</script>"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "manifest.json").write_text(json.dumps({"kind": "scores"}))
    return tmp_path


def test_a_suite_is_a_measure_and_its_tasks_have_tables_and_heatmaps(run_dir):
    results = gather(run_dir)

    assert results.main_suites == ["ruler"]
    assert results.recall_suites == ["ruler", "ruler: essay", "ruler: vt"]
    assert results.models[0].recall("ruler", 8192).value == 0.75
    assert results.depths("ruler: vt") == [0.0, 1.0] and results.depths("ruler") == []
    assert headline(results)[0].endswith("RULER at 8K: base 75% (30–90), n = 4.")


def test_the_page_shows_them_and_escapes_what_models_wrote(run_dir):
    write_report([run_dir], run_dir / "report.html")
    page = (run_dir / "report.html").read_text()

    assert "RULER: vt by length and depth" in page and "RULER: essay by length" in page
    assert "<script>alert" not in page and "\x1b" not in page
