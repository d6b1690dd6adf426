"""LongBench v2 from a file of the published format: prompts, cuts, scores, groups, errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import unspool
from unspool.core.errors import ConfigError, DataError
from unspool.evals.backends.mock import Oracle
from unspool.evals.run import score as score_run
from unspool.evals.suite import Ask
from unspool.evals.suites.longbench_v2 import HEAD, SUITE, LongBenchV2Eval, score

from .suites import num_tokens, oracle
from .toy import cell_of


def record(number: int, **changes) -> dict:
    return {
        "_id": f"id{number}",
        "domain": "Single-Document QA",
        "sub_domain": "Legal",
        "difficulty": ("easy", "hard")[number % 2],
        "length": ("short", "medium", "long")[number % 3],
        "question": f"Which clause has number {number}?",
        **{f"choice_{letter}": f"clause {letter}{number}" for letter in "ABCD"},
        "answer": "ABCD"[number % 4],
        "context": f"Begin of {number}. " + "mita bela dora kifu. " * (20 + 400 * (number % 2)) + f"End of {number}.",
        **changes,
    }


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([record(number) for number in range(12)]))
    return str(path)


def test_a_short_text_is_whole_and_a_long_one_is_cut_in_the_middle(data, tokenizer):
    sources, task = SUITE.load(tokenizer, {"data": data}), SUITE.tasks["questions"]
    for index in range(4):
        asked = task.build(sources, Ask(length=1024, seed=0, index=index))
        text = asked.context.removeprefix(HEAD)
        assert text.startswith(f"Begin of {index}.") and text.endswith(f"End of {index}.")
        assert asked.meta["cut"] == (index % 2 == 1)
        used = num_tokens(tokenizer, task, asked)
        assert used <= 1024 and (used >= 0.98 * 1024 or not asked.meta["cut"])
        assert f"(C) clause C{index}\n(D) clause D{index}" in asked.question
        assert (task.score(oracle(asked), asked), task.score("", asked)) == (1, 0)


def test_the_letter_is_read_from_the_published_sentence(data, tokenizer):
    asked = SUITE.tasks["questions"].build(SUITE.load(tokenizer, {"data": data}), Ask(length=1024, seed=0, index=1))

    assert asked.references == ("B",)
    assert score("B) clause B1.", asked) == score("B", asked) == 1
    assert score("A) or B)", asked) == score("Bela", asked) == score("b)", asked) == 0
    assert score("I think so. **The correct answer is (B)**", asked) == 1
    assert score("I think so. The correct answer is B.", asked) == 1


def test_scores_have_groups_and_baselines(data, scoring, tokenizer):
    config = LongBenchV2Eval.model_validate({"suite": "longbench_v2", "lengths": [1024], "paths": {"data": data}})
    summary = score_run(replace(scoring, evals=[config]), Oracle(tokenizer))

    assert cell_of(summary, "questions", 1024)["n"] == 12
    assert cell_of(summary, "questions, hard", 1024)["n"] == 6
    assert cell_of(summary, "questions, medium", 1024)["n"] == 4
    assert cell_of(summary, None, 1024)["baselines"]["first"] == 0.25


def test_a_missing_file_says_where_it_comes_from_and_what_it_has():
    with pytest.raises(
        ConfigError,
        match=r"paths needs one entry, data: .+ fields context, question, choice_A, .+, "
        r"answer; use data\.json of zai-org/LongBench-v2",
    ):
        unspool.evaluate("asset:tiny-base", "longbench_v2", [1024])
    with pytest.raises(ConfigError, match=r"missing\.json: file not found"):
        unspool.evaluate("asset:tiny-base", "longbench_v2", [1024], paths={"data": "missing.json"})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"answer": ""}, "no answer"),
        ({"choice_B": None}, "no choice_B"),
        ({"answer": "E"}, "answer 'E' is not A, B, C or D"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, tokenizer, changes, problem):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record(0)) + "\n" + json.dumps(record(1, **changes)) + "\n")
    with pytest.raises(DataError, match=rf"data\.jsonl, record 2: {problem}\. Expected fields: context, question"):
        SUITE.load(tokenizer, {"data": str(path)})
