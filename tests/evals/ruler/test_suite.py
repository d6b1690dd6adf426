"""What holds for all thirteen tasks: lengths, oracle, empty answers, errors."""

from dataclasses import replace
from typing import Any

import pytest

from unspool.core.errors import ConfigError, UnspoolError
from unspool.evals.prompts import encode
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import SUITE, fitting
from unspool.evals.suites.ruler.haystacks import Sources

from .conftest import Build

TASKS = list(SUITE.tasks)


def total(tokenizer: Any, task: str, asked: Question) -> int:
    text = asked.context + asked.question + asked.prefix
    return len(encode(tokenizer, text)) + SUITE.tasks[task].answer_tokens


def test_the_suite_has_rulers_thirteen_tasks() -> None:
    assert len(TASKS) == 13
    assert {name: SUITE.tasks[name].answer_tokens for name in ("niah_single_1", "vt", "cwe", "fwe", "qa_1")} == {
        "niah_single_1": 128,
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
        "qa_1": 32,
    }


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("length", "samples"), [(1024, 12), (8192, 2), pytest.param(65536, 2, marks=pytest.mark.slow)])
def test_an_oracle_scores_all_an_empty_answer_nothing_and_the_length_is_met(
    build: Build, shipped_tokenizer: Any, task: str, length: int, samples: int
) -> None:
    score = SUITE.tasks[task].score
    for index in range(samples):
        asked = build(task, length=length, index=index)
        used = total(shipped_tokenizer, task, asked)

        assert 0.99 * length <= used <= length
        assert score(" ".join(asked.references), asked) == 1
        assert score("", asked) == score("I do not know.", asked) == 0


@pytest.mark.parametrize("task", TASKS)
def test_reference_mode_never_exceeds_the_length_either(build: Build, shipped_tokenizer: Any, task: str) -> None:
    for index in range(3):
        asked = build(task, index=index, mode="reference")

        assert total(shipped_tokenizer, task, asked) <= 4096
        assert SUITE.tasks[task].score(" ".join(asked.references), asked) == 1
        assert SUITE.tasks[task].score("", asked) == 0


@pytest.mark.parametrize("mode", ["fixed", "reference"])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_that_cannot_work_are_refused_and_nothing_loops(build: Build, task: str, mode: str) -> None:
    refused = 0
    for length in (1, 40, 129, 200, 300, 450, 700):
        try:
            build(task, length=length, mode=mode)
        except ConfigError as error:
            assert f"length {length} is too short" in str(error)
            refused += 1
    assert refused >= 2


@pytest.mark.parametrize("task", TASKS)
def test_what_a_chat_template_adds_is_kept_free(build: Build, shipped_tokenizer: Any, task: str) -> None:
    asked = build(task, overhead=100)

    assert 0.99 * 4096 <= total(shipped_tokenizer, task, asked) + 100 <= 4096


def test_without_counting_the_length_would_be_exceeded(sources: Sources, shipped_tokenizer: Any) -> None:
    """The check above can fail: a counter that sees too few tokens gives prompts that are too long."""

    class Blind(Sources):
        def count(self, text: str) -> int:
            return super().count(text) * 9 // 10

    blind = Blind(shipped_tokenizer, {}, sources.wording)
    asked = SUITE.tasks["niah_single_2"].build(blind, Ask(length=4096, seed=42, index=0))

    assert total(shipped_tokenizer, "niah_single_2", asked) > 4096


def test_questions_do_not_depend_on_earlier_questions(shipped_tokenizer: Any, build: Build) -> None:
    fresh = SUITE.load(shipped_tokenizer, {})
    for task in TASKS:
        for index in (7, 0):
            assert SUITE.tasks[task].build(fresh, Ask(length=1024, seed=1, index=index)) == build(
                task, length=1024, seed=1, index=index
            )


def test_seed_and_index_change_the_question(build: Build) -> None:
    for task in TASKS:
        asked = {build(task, length=1024, seed=seed, index=index).context for seed in (1, 2) for index in (0, 1)}
        assert len(asked) == 4, task


def test_fitting_ends_when_sizes_do_not_help() -> None:
    """A task whose prompts jump from too short to too long: the longest that fits is taken."""
    budget = fitting.TokenBudget(task="jumps", length=1000, tokens=900)

    made, size = fitting.fit(lambda size: 500 if size < 77 else 1500, lambda tokens: tokens, budget, fewest=1, start=3)

    assert (made, size) == (500, 76)
    with pytest.raises(ConfigError, match="too short"):
        fitting.fit(lambda size: 901, lambda tokens: tokens, budget, fewest=1, start=50)
    assert fitting.fit(lambda size: 10, lambda tokens: tokens, replace(budget), fewest=1, start=5)[0] == 10


def test_unknown_paths_are_refused(shipped_tokenizer: Any) -> None:
    with pytest.raises(UnspoolError, match="haystack"):
        SUITE.load(shipped_tokenizer, {"haystacks": "essays.txt"})


def test_reference_mode_of_vt_fills_long_lengths_as_ruler_does(build: Build, shipped_tokenizer: Any) -> None:
    """RULER's own generator reaches 99.9% of 16K (test_beside_ruler.py); its search knows the example's tokens."""
    asked = [build("vt", length=16384, index=index, mode="reference") for index in range(3)]
    used = [len(shipped_tokenizer.encode(one.context + one.question + one.prefix)) + 30 for one in asked]
    assert all(0.99 * 16384 <= tokens <= 16384 for tokens in used), used
