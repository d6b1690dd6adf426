"""From samples to ranks and verdicts: paired answers, missing answers, and the notes about them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from unspool.core.artifacts import publish
from unspool.evals.suites import SUITES
from unspool.evals.suites.helmet.suite import HelmetEval
from unspool.studies.arm_comparison import compare_arms, difference, over_prompts
from unspool.studies.arm_scores import (
    Answer,
    Measure,
    Part,
    contributions_of,
    find_measures,
    mean_of,
    measures_of,
    ranking,
    read_answers,
    value_of,
)
from unspool.studies.load import Study
from unspool.studies.paper_numbers import Paper, beside_paper, read_short
from unspool.studies.schema import Margin
from unspool.studies.study_report import markdown

SHORT, LONG = Part("niah", None, 128), Part("niah", None, 512)
FAR = Part("perplexity", None, 512, 256, 512)


def measure(name: str, part: Part) -> Measure:
    return Measure(name=name, suite=part.suite, task=part.task, parts=((1.0, part),))


MEASURES = [measure("niah/128", SHORT), measure("niah/512", LONG), measure("perplexity/256-512", FAR)]


def answers(seed: int, short, long, losses=()):
    """Scores by question; a question is known by its seed, length and number."""
    found = {}
    for part, scores in ((SHORT, short), (LONG, long), (FAR, losses)):
        if len(scores):
            keys = [f"{seed}-{part.suite}-{part.length}-{at}" for at in range(len(scores))]
            found[part] = {key: Answer(key, float(score)) for key, score in zip(keys, scores, strict=True)}
    return found


class Arms:
    """As much of a study as comparing needs."""

    def __init__(self, names, against=None, compare=None):
        self.study = Study(
            name="made-up", out=Path(), text="", runs=[], baseline=names[0], measures=MEASURES, compare=compare,
            against=against or {name: [names[0]] if name != names[0] else [] for name in names}, margin=Margin(),
        )  # fmt: skip
        object.__setattr__(self.study, "runs", [_Run(name) for name in names])

    def compare(self, found, context=128):
        return compare_arms(self.study, found, context=context)


class _Run:
    def __init__(self, arm):
        self.arm = arm


def table_of(result, name):
    return next(table for table in result["measures"] if table["measure"] == name)


def verdict(result, name, arm):
    return next(one for one in table_of(result, name)["comparisons"] if one["arm"] == arm)


# Reading


def save_scores(folder: Path, samples, evals, prompts=()) -> Path:
    with publish(folder, kind="scores", inputs={}, settings={"evals": evals}) as draft:
        (draft.folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        if prompts:
            (draft.folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    return folder


def sample(suite, index, score, length=128, **more):
    return {"suite": suite, "length": length, "index": index, "hash": f"{suite}{index}", "score": score, **more}


def test_questions_on_one_context_are_one_prompt(tmp_path):
    kv = [sample("key_value", index, 1.0) for index in range(6)]
    tasks = [sample("ruler", index, 0.5, task="qa") for index in range(3)]
    folder = save_scores(
        tmp_path / "scores",
        [*kv, *tasks],
        [{"suite": "key_value", "lengths": [128], "questions": 4}, {"suite": "ruler", "lengths": [128]}],
        [{"hash": f"ruler{index}", "context": "same" if index < 2 else "other"} for index in range(3)],
    )
    found = read_answers(folder)
    assert len({answer.prompt for answer in found[Part("key_value", None, 128)].values()}) == 2
    assert sorted({answer.prompt for answer in found[Part("ruler", "qa", 128)].values()}) == [
        "ruler other",
        "ruler same",
    ]


def test_short_tasks_have_no_questions_and_do_not_stop_the_comparison(tmp_path):
    short = {"suite": "short", "task": "piqa", "length": 0, "cells": [{"suite": "short", "task": "piqa", "value": 0.5}]}
    folder = save_scores(tmp_path / "scores", [short, sample("niah", 0, 1.0)], [{"suite": "short"}])
    assert list(read_answers(folder)) == [Part("niah", None, 128)]


def test_longppl_and_mrcr_are_measures_of_a_study():
    """LongPPL has one loss per window, not one per range of positions; MRCR's recovery may be below 0."""
    evals = [{"suite": "longppl", "length": "32K"}, {"suite": "mrcr", "lengths": ["32K"]}]
    evals = [SUITES[entry["suite"]].config.model_validate(entry) for entry in evals]
    found = measures_of([SimpleNamespace(evals=evals)])
    assert [(one.name, one.is_loss, one.is_bounded, one.is_beyond(8192)) for one in found] == [
        ("longppl/32K", True, False, True),
        ("mrcr/32K", False, False, True),
    ]
    needles = measure("niah/512", LONG)
    assert needles.is_bounded and not mean_of("score", [needles, found[1]]).is_bounded


def test_what_was_not_judged_is_missing_and_not_zero(tmp_path):
    folder = save_scores(tmp_path / "scores", [sample("niah", 0, 1.0), sample("niah", 1, None)], [])
    found = read_answers(folder)
    assert value_of(found, measure("niah/128", SHORT)) == 1.0
    assert value_of(found, measure("niah/512", LONG)) is None
    assert read_answers(tmp_path / "nothing") is None


def test_losses_are_read_by_range_of_positions(tmp_path):
    losses = [{"from": 0, "to": 256, "value": 2.0, "n": 255}, {"from": 256, "to": 512, "value": 4.0, "n": 256}]
    folder = save_scores(tmp_path / "scores", [sample("perplexity", 0, 3.0, length=512, losses=losses)], [])
    assert value_of(read_answers(folder), MEASURES[2]) == 4.0


# Categories, and a paper's numbers


def test_a_suite_with_categories_is_the_mean_of_its_categories():
    recipe = SimpleNamespace(
        evals=[HelmetEval(suite="helmet", lengths=["32K"], tasks=["json_kv", "nq", "popqa", "msmarco"])]
    )
    found = {measure.name: measure for measure in measures_of([recipe])}
    scores = {"json_kv": 1.0, "nq": 0.4, "popqa": 0.2, "msmarco": 0.0}
    given = {Part("helmet", task, 32768): {task: Answer(task, score)} for task, score in scores.items()}

    assert value_of(given, found["helmet/rag/32K"]) == pytest.approx(0.3)
    assert value_of(given, found["helmet/32K"]) == pytest.approx((1.0 + 0.3 + 0.0) / 3), "not the mean of four tasks"
    assert [measure.name for measure in find_measures("helmet/rag", list(found.values()))] == ["helmet/rag/32K"]


def test_our_means_are_shown_next_to_the_papers_numbers(tmp_path):
    arms = Arms(["abf", "utk"])
    result = arms.compare({"abf": {0: answers(0, [1, 1], [1, 0])}, "utk": {0: answers(0, [1, 0], [1, 1])}})
    paper = Paper(
        source="A paper, Table 1",
        scale="7B",
        note="",
        columns={"far": ["niah/512"], "both": ["niah"], "other": [], "unknown": ["ruler/4K"], "short": ["short@64k"]},
        numbers={"utk": [75.0, 80.0, 12.5, None, 60]},
        others={"untouched": [10, 20, 30, 40, 50]},
    )
    for place, cells in {
        "scores/64k": [{"suite": "short", "task": "mmlu", "value": 0.5}, {"suite": "niah", "value": 1.0}],
        "scores/sft": [{"suite": "short", "task": "mmlu", "value": 0.9}],
        "short/64k": [
            {"suite": "short", "task": "gsm8k", "value": 0.25},
            {"suite": "short", "task": "x", "value": None},
        ],
    }.items():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "summary.json").write_text(json.dumps({"cells": cells}))
    short = read_short(tmp_path)
    assert short == {"64k": {"mmlu": 0.5, "gsm8k": 0.25}, "sft": {"mmlu": 0.9}}
    found = beside_paper(paper, ["abf", "utk"], MEASURES, result["measures"], {"utk": [short]})

    assert [row["here"] for row in found["rows"]] == [
        [50, 75, None, None, None],
        [100, 75, None, None, 37.5],
        [None] * 5,
    ]
    text = markdown({"name": "made-up", "runs": [], "paper": found, **result})
    assert "| utk | 100.0 (paper 75.0) | 75.0 (paper 80.0) | – (paper 12.5) | – | 37.5 (paper 60.0) |" in text
    assert "| abf | 50.0 | 75.0 | – | – | – |" in text and "| untouched | – (paper 10.0)" in text
    assert "at its scale (7B)" in text


# Pairing


def test_only_questions_that_both_answered_under_one_seed_are_compared():
    ours = {0: answers(0, [1, 1, 0], []), 1: answers(1, [1, 1, 1], [])}
    theirs = {0: answers(0, [1, 0], []), 2: answers(2, [0, 0, 0], [])}
    found = contributions_of(ours, theirs, MEASURES[0])
    assert list(found) == [0], "seeds 1 and 2 have other models and other prompts"
    assert found[0] == pytest.approx({"0-niah-128-0": 0.0, "0-niah-128-1": 0.5})


def test_questions_of_one_context_count_as_one():
    """Twelve questions on two contexts, all of one answered: two prompts cannot prove anything, twelve would."""
    ours = {0: {SHORT: {f"{at}": Answer(f"context {at // 6}", 1.0) for at in range(12)}}}
    theirs = {0: {SHORT: {f"{at}": Answer(f"context {at // 6}", 0.0) for at in range(12)}}}
    found = contributions_of(ours, theirs, MEASURES[0])
    assert difference(found) == pytest.approx(1.0)
    assert over_prompts(found, bounded=True).p == pytest.approx(0.5)


def test_a_mean_of_measures_weighs_them_equally_for_any_n():
    both = mean_of("score", MEASURES[:2])
    found = answers(0, [1] * 10, [0, 1])
    assert value_of(found, both) == pytest.approx(0.75)
    gap = contributions_of({0: found}, {0: answers(0, [0] * 10, [0, 0])}, both)
    assert difference(gap) == pytest.approx(0.75)


# Ranks and verdicts


def test_arms_are_ranked_by_long_scores_with_missing_ones_last():
    arms = Arms(["a", "b", "c"])
    result = arms.compare(
        {
            "a": {0: answers(0, [1] * 4, [0, 0, 0, 1], [3.0])},
            "b": {0: answers(0, [0] * 4, [1, 1, 0, 1], [3.5])},
            "c": {},
        }
    )
    assert [(entry["rank"], entry["arm"]) for entry in result["ranking"]] == [(1, "b"), (2, "a"), (None, "c")]
    assert result["ranked_by"] == {"score": ["niah/512"], "loss": ["perplexity/256-512"]}
    assert table_of(result, "niah/512")["arms"]["c"] == {"mean": None, "deviation": None, "n": 0, "by_seed": {}}
    assert verdict(result, "niah/512", "c")["verdict"] == "not measured"
    assert "| – | c | – |" in markdown(result | {"name": "made-up", "runs": []})


def test_ranks_rest_on_the_seeds_that_all_arms_have():
    """Seed 1 has harder prompts: the arm that was spared them must not win by that."""
    result = Arms(["a", "b"]).compare(
        {"a": {0: answers(0, [], [1, 1, 1, 0]), 1: answers(1, [], [0] * 4)}, "b": {0: answers(0, [], [1, 1, 0, 0])}}
    )
    means = {arm: entry["mean"] for arm, entry in table_of(result, "niah/512")["arms"].items()}
    assert means["b"] > means["a"]
    assert [entry["rank"] for entry in result["ranking"]] == [None, None], "no loss was measured"
    only_scores = Arms(["a", "b"], compare=["niah/512"]).compare(
        {"a": {0: answers(0, [], [1, 1, 1, 0]), 1: answers(1, [], [0] * 4)}, "b": {0: answers(0, [], [1, 1, 0, 0])}}
    )
    assert only_scores["ranked_seeds"] == ["0"]
    assert [(entry["rank"], entry["arm"]) for entry in only_scores["ranking"]] == [(1, "a"), (2, "b")]


def test_mean_and_deviation_are_over_seeds_by_hand():
    result = Arms(["a"]).compare({"a": {0: answers(0, [], [1, 1, 0, 0]), 1: answers(1, [], [1, 1, 1, 1])}})
    entry = table_of(result, "niah/512")["arms"]["a"]
    assert entry["mean"] == 0.75
    assert entry["deviation"] == pytest.approx(0.353553, abs=1e-6)
    assert (entry["n"], entry["by_seed"]) == (8, {"0": 0.5, "1": 1.0})


def test_verdicts_say_no_more_than_the_sample():
    zeros, ones = [0] * 20, [1] * 20
    found = {
        "a": {0: answers(0, [], zeros)},
        "clear": {0: answers(0, [], ones)},
        "slight": {0: answers(0, [], [1] * 4 + [0] * 16)},
    }
    result = Arms(["a", "clear", "slight"]).compare(found)
    clear = verdict(result, "niah/512", "clear")
    assert (clear["verdict"], clear["of"], clear["says"]) == (
        "better",
        "models",
        "better on these prompts; one seed only",
    )
    slight = verdict(result, "niah/512", "slight")
    assert slight["prompts"]["p"] == pytest.approx(0.125), "4 to 0, as in docs/results/smollm2-32k.md"
    assert slight["prompts"]["p_holm"] == pytest.approx(0.125)
    assert slight["says"] == "the sample is too small to tell"
    assert (clear["seeds"]["p"], slight["seeds"]["p"]) == (None, None)


def test_a_loss_is_better_when_lower_and_six_windows_cannot_tell_seven_arms_apart():
    names = ["a", *"bcdefgh"]
    found = {
        name: {0: answers(0, [], [1], [3.0 - 0.1 * at - 0.01 * w for w in range(6)])} for at, name in enumerate(names)
    }
    result = Arms(names).compare(found)
    assert {one["says"] for one in table_of(result, "perplexity/256-512")["comparisons"]} == {
        "the sample is too small to tell (n = 6 could show nothing)"
    }
    found = {
        name: {0: answers(0, [], [1], [3.0 - 0.1 * at - 0.01 * w for w in range(12)])} for at, name in enumerate(names)
    }
    result = Arms(names).compare(found)
    assert {one["verdict"] for one in table_of(result, "perplexity/256-512")["comparisons"]} == {"better"}


def test_three_seeds_that_agree_say_it_of_the_recipe_and_two_that_do_not_say_it_of_the_models():
    def arm(gains):
        return {
            seed: answers(seed, [], [1], [3.0 + 0.01 * w + gain for w in range(8)]) for seed, gain in enumerate(gains)
        }

    result = Arms(["a", "sure", "mixed"]).compare(
        {"a": arm([0, 0, 0]), "sure": arm([-0.5, -0.52, -0.48]), "mixed": arm([-0.5, -0.02])}
    )
    sure, mixed = (verdict(result, "perplexity/256-512", name) for name in ("sure", "mixed"))
    assert (sure["verdict"], sure["of"], sure["says"]) == ("better", "seeds", "better, over 3 seeds")
    assert (mixed["verdict"], mixed["of"]) == ("better", "models")
    assert mixed["says"] == "better on these prompts; 2 seeds are too few to conclude this for the recipe"


def test_a_significant_but_tiny_difference_is_called_tiny():
    def arm(*gains):
        return {
            seed: answers(seed, [], [1], [3.0 + 0.1 * w + gain for w in range(12)]) for seed, gain in enumerate(gains)
        }

    result = Arms(["a", "b"]).compare({"a": arm(0), "b": arm(0.001)})
    says = verdict(result, "perplexity/256-512", "b")["says"]
    assert says == "worse by less than 0.02 nats on these prompts; one seed only"
    result = Arms(["a", "b"]).compare({"a": arm(0, 0, 0), "b": arm(0.001, 0.0011, 0.0009)})
    assert verdict(result, "perplexity/256-512", "b")["says"] == "worse by less than 0.02 nats, over 3 seeds"


def test_arms_that_surely_differ_by_less_than_the_margin_are_equal():
    found = {name: {0: answers(0, [], [1], [3.0 + 0.1 * w + tiny * (-1) ** w for w in range(8)])}
             for name, tiny in (("a", 0.0), ("b", 0.001))}  # fmt: skip
    assert verdict(Arms(["a", "b"]).compare(found), "perplexity/256-512", "b")["says"] == "equal within 0.02 nats"


def test_arms_are_compared_with_those_that_the_study_names():
    arms = Arms(["a", "b", "c"], against={"a": [], "b": ["a", "c"], "c": ["a"]})
    same = {0: answers(0, [], [1, 0], [3.0])}
    result = arms.compare({"a": same, "b": same, "c": same})
    pairs = [(one["arm"], one["against"]) for one in table_of(result, "niah/512")["comparisons"]]
    assert pairs == [("b", "a"), ("b", "c"), ("c", "a")]
    assert [entry["rank"] for entry in result["ranking"]] == [1, 1, 1], "equal arms share a rank"


# Which measures


def test_the_measures_of_a_recipe_are_known_before_it_runs():
    from unspool.recipe.load import load_recipe

    names = [one.name for one in measures_of([load_recipe("tiny").recipe])]
    assert names[:3] == ["niah/256", "niah/1K", "niah/2K"]
    assert names[-1] == "perplexity/1K-2K"


def test_long_measures_rank_and_where_there_are_none_the_longest():
    assert [one.name for one in ranking(MEASURES, None, 128)] == ["niah/512", "perplexity/256-512"]
    assert [one.name for one in ranking(MEASURES, None, 4096)] == ["niah/512", "perplexity/256-512"]
    assert [one.name for one in ranking(MEASURES, ["niah/128"], 128)] == ["niah/128"]
