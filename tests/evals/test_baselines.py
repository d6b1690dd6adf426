"""Trivial baselines: their items, scores and means, and where they are printed."""

import json

import numpy as np
import pytest

import unspool
from unspool.evals.baselines import BASELINES, baseline_means, baseline_scores, describe_baselines, pick_items
from unspool.reporting.gather import gather
from unspool.reporting.text_formats import report_values


def test_each_baseline_takes_its_item():
    rng = np.random.default_rng(0)
    drawn = [pick_items("abcd", rng) for _ in range(40)]

    assert {one["first"] for one in drawn} == {"a"} and {one["last"] for one in drawn} == {"d"}
    assert {one["random"] for one in drawn} == set("abcd")


def test_items_are_scored_like_answers():
    found = baseline_scores(["x", "y"], lambda answer: float(answer == "y"), np.random.default_rng(0))

    assert found["baselines"] | {"random": None} == {"random": None, "first": 0.0, "last": 1.0}
    assert baseline_scores([], lambda answer: 1.0, np.random.default_rng(0)) == {}
    assert baseline_scores(["x"], lambda answer: None, np.random.default_rng(0)) == {}, "a judge scores the answers"


def test_means_need_the_baselines_of_all_parts():
    one, other = ({"baselines": dict.fromkeys(BASELINES, value)} for value in (0.0, 0.5))

    assert baseline_means([one, other]) == {"baselines": dict.fromkeys(BASELINES, 0.25)}
    assert baseline_means([one, {}]) == baseline_means([]) == {}


def test_they_are_listed_by_length():
    found = {8192: {"random": 0.004, "first": 0.0, "last": 0.25}, 1024: dict.fromkeys(BASELINES, 0.5)}

    assert describe_baselines(found) == (
        "trivial baselines (random, first, last item): 1K: 50%, 50%, 50%; 8K: 0.4%, 0%, 25%"
    )


@pytest.fixture(scope="module")
def result() -> unspool.EvalResult:
    return unspool.evaluate("asset:tiny-base", "indirect_needle", ["1K"], samples=4, backend="oracle", tasks=["work"])


def test_they_stand_beside_the_scores_in_table_page_and_json(result, tmp_path):
    [cell] = [cell for cell in result.cells() if cell["task"] is None]
    line = describe_baselines({1024: cell["baselines"]})

    assert line in " ".join(result.table().split())
    page = result.save(tmp_path / "page.html").read_text()
    assert f"T{line[1:]}." in page.replace("\u2060", "")
    assert json.loads(result.save(tmp_path / "scores.json").read_text())["cells"][0]["baselines"] == cell["baselines"]
    [model] = report_values([gather(result.folder)])["runs"][0]["models"]
    assert model["cells"][0]["baselines"] == cell["baselines"]
