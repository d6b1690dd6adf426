"""Suites that consist of tasks, from settings to summary, on a suite made for it."""

from dataclasses import replace

import pytest

from unspool.evals import suites
from unspool.evals.backends.mock import Empty, Oracle
from unspool.evals.run import score
from unspool.evals.suites import helmet
from unspool.evals.suites.helmet import HelmetEval
from unspool.evals.summary import suite_summary, task_cells

from .suites import category_means
from .toy import TOY, cell_of, entry, lines

pytestmark = pytest.mark.usefixtures("toy_suite")


def test_an_oracle_scores_100_and_silence_0_with_means_over_tasks(scoring, tokenizer):
    summary = score(scoring, Oracle(tokenizer))
    silent = score(replace(scoring, out_dir=scoring.root / "silent"), Empty(tokenizer))

    for length in (256, 512):
        for task in ("lone", "shared", "labelled"):
            cell = cell_of(summary, task, length)
            assert (cell["value"], cell["n"], cell["mode"]) == (1.0, 12, "fixed")
            assert cell_of(silent, task, length)["value"] == 0.0
        mean = cell_of(summary, None, length)
        assert (mean["value"], mean["n"], mean["tasks"], mean["of_tasks"], mean["not_judged"]) == (1.0, 36, 3, 4, 12)


def test_what_no_judge_has_scored_is_missing_and_not_zero(scoring, tokenizer):
    cell = cell_of(score(scoring, Oracle(tokenizer)), "judged", 256)

    assert (cell["value"], cell["low"], cell["n"], cell["not_judged"]) == (None, None, 0, 12)
    sample = next(one for one in lines(scoring.out_dir / "samples.jsonl") if one["task"] == "judged")
    assert sample["score"] is None
    assert sample["judge"] == {
        "protocol": "qa",
        "question": "What is it about?",
        "references": ["number 0"],
        "key_points": ["number 0"],
    }


def test_graded_scores_get_a_bootstrap_interval(scoring, tokenizer):
    class Half(Oracle):
        def answer(self, prompt, question):
            return super().answer(prompt, question) if "answer1" in question.text.oracle else "something else"

    cell = cell_of(score(scoring, Half(tokenizer)), "shared", 256)

    assert cell["value"] == pytest.approx(0.5 + 0.5 * 3 / 12)
    assert 0.5 <= cell["low"] < cell["value"] < cell["high"] < 0.9


def test_depths_become_rows_of_a_heatmap(scoring, tokenizer):
    summary = score(scoring, Oracle(tokenizer))

    deep = [cell for cell in summary["cells"] if cell["task"] == "lone" and cell["depth"] is not None]
    assert {cell["depth"] for cell in deep} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert sum(cell["n"] for cell in deep) == 24
    assert not [cell for cell in summary["cells"] if cell["task"] == "labelled" and cell["depth"] is not None]


def test_the_summary_says_how_far_it_holds(scoring, tokenizer):
    class Short(Oracle):
        def answer(self, prompt, question):
            return super().answer(prompt, question) if prompt.length == 256 else ""

    [suite] = score(scoring, Short(tokenizer))["suites"]

    assert suite["effective_length"] == 256
    assert (suite["adaptation_rate"]["value"], suite["adaptation_rate"]["to"]) == (0.0, 512)


def test_prompts_are_listed_by_hash_before_they_run(scoring, tokenizer):
    score(scoring, Oracle(tokenizer))

    listed, samples = (lines(scoring.out_dir / name) for name in ("prompts.jsonl", "samples.jsonl"))
    assert len(listed) == len({line["hash"] for line in listed}) + 24, "labelled and judged prompts know no length"
    assert sorted((s["task"], s["length"], s["index"], s["hash"]) for s in samples) == sorted(
        (line["task"], line["length"], line["index"], line["hash"]) for line in listed
    )
    assert all(line["prompt_tokens"] + line["answer_tokens"] <= line["length"] for line in listed)


def test_questions_in_pairs_also_count_as_pairs(scoring, tokenizer, monkeypatch):
    lone = TOY.tasks["lone"]

    def paired(sources, ask):
        return replace(lone.build(sources, ask), meta={"pair": ask.index // 2})

    monkeypatch.setitem(suites.SUITES, "ruler", replace(TOY, tasks={"lone": replace(lone, build=paired)}))

    class Odd(Oracle):
        def answer(self, prompt, question):
            number = int(question.reference) - 1000
            return super().answer(prompt, question) if number % 2 or number < 4 else ""

    summary = score(scoring, Odd(tokenizer))

    assert cell_of(summary, "lone", 256)["value"] == pytest.approx(8 / 12)
    pairs = cell_of(summary, "lone, pairs", 256)
    assert (pairs["value"], pairs["n"], pairs["metric"]) == (pytest.approx(2 / 6), 6, "pair accuracy")
    assert cell_of(summary, None, 256)["value"] == pytest.approx(8 / 12), "pairs are no task of their own"


def test_a_mean_gives_every_task_the_same_weight(scoring, tokenizer):
    """Six hundred right answers of one task do not drown twelve wrong ones of another."""

    class LoneOnly(Oracle):
        def answer(self, prompt, question):
            return super().answer(prompt, question) if "number" in question.text.question.question else ""

    config = entry(tasks=["lone", "labelled"], samples=40)
    summary = score(replace(scoring, evals=[config]), LoneOnly(tokenizer))
    mean = cell_of(summary, None, 256)

    assert (cell_of(summary, "lone", 256)["n"], cell_of(summary, "labelled", 256)["n"]) == (40, 30)
    assert mean["value"] == 0.5 and mean["n"] == 70 and (mean["tasks"], mean["of_tasks"]) == (2, 4)
    half = [cell_of(summary, task, 256)["high"] - cell_of(summary, task, 256)["value"] for task in ("lone", "labelled")]
    assert mean["high"] == pytest.approx(0.5 + (half[0] ** 2 + half[1] ** 2) ** 0.5 / 2)
    [suite] = summary["suites"]
    assert [(one["length"], one["name"], one["value"], one["n"]) for one in suite["means"]] == [
        (256, "mean", 0.5, 70),
        (512, "mean", 0.5, 70),
    ]
    assert suite["adaptation_rate"]["value"] == 1.0


CATEGORIES = {"first": ("lone", "shared"), "second": ("labelled",)}


def test_categories_are_means_of_their_tasks_and_the_whole_is_their_mean(scoring, tokenizer, monkeypatch):
    monkeypatch.setitem(suites.SUITES, "ruler", replace(TOY, categories=CATEGORIES))

    class NoLabels(Oracle):
        def answer(self, prompt, question):
            return "" if "colour" in question.text.question.question else super().answer(prompt, question)

    [suite] = score(replace(scoring, evals=[entry(lengths=[256])]), NoLabels(tokenizer))["suites"]
    means = {one["name"]: one for one in suite["means"]}

    assert (means["first"]["value"], means["second"]["value"]) == (1.0, 0.0)
    assert means["overall"]["value"] == 0.5, "of categories"
    assert means["mean"]["value"] == pytest.approx(2 / 3), "of tasks"
    assert (means["overall"]["categories"], means["overall"]["n"]) == (2, 36)
    assert suite["effective_length_of"] == "overall"


def test_a_category_without_one_of_its_tasks_is_missing_and_so_is_the_whole(scoring, tokenizer, monkeypatch):
    categories = {**CATEGORIES, "third": ("judged",)}
    monkeypatch.setitem(suites.SUITES, "ruler", replace(TOY, categories=categories))

    found = score(replace(scoring, evals=[entry(tasks=["lone", "judged"], lengths=[256])]), Oracle(tokenizer))
    [suite] = found["suites"]
    means = {one["name"]: one for one in suite["means"]}

    assert [means[name]["value"] for name in ("mean", "first", "second", "third", "overall")] == [1.0, *[None] * 4]
    assert [(means[name]["tasks"], means[name]["of_tasks"]) for name in categories] == [(1, 2), (0, 1), (0, 1)]
    assert (means["overall"]["categories"], means["overall"]["of_categories"], means["overall"]["n"]) == (0, 3, 0)
    assert (suite["effective_length"], suite["effective_length_of"]) == (256, "mean")


def test_helmets_means_are_those_of_its_own_function():
    tasks = {task: at / 20 for at, task in enumerate(helmet.SUITE.tasks)}
    config = HelmetEval(suite="helmet", lengths=[8192])
    samples = [
        {"suite": "helmet", "length": 8192, "task": task, "depth": None, "score": value}
        for task, value in tasks.items()
        for _ in range(2)
    ]
    cells = task_cells(config, list(helmet.SUITE.tasks.values()), samples)

    found = {
        one["name"]: one["value"] for one in suite_summary(config, helmet.SUITE.categories, cells, samples)["means"]
    }

    for name, value in category_means(tasks).items():
        assert found[name] == pytest.approx(value)
    assert found["mean"] != pytest.approx(found["overall"]), "nothing would be told apart"
