"""Short answers against hand-made cases, and what is wrong in HELMET's way shown in both modes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.evals.scoring import answers
from unspool.evals.scoring.answers import (
    best,
    exact_match,
    exact_match_reference,
    normalize,
    normalize_zh,
    parse_answer,
    raw_or_parsed,
    shared_f1,
    sub_em,
    sub_em_reference,
)
from unspool.evals.suite import Question
from unspool.evals.suites.helmet import rag


def test_normalizing_removes_case_punctuation_articles_and_spaces():
    assert normalize("The  Cat, an  owl; A. b'c") == "cat owl bc"
    assert normalize("Theatre another") == "theatre another"
    assert normalize_zh("你好， World！ 。") == "你好world"


@given(st.text())
def test_normalizing_twice_changes_nothing(text: str):
    # Taking punctuation away may join letters into an article, which the second time goes: that is SQuAD's rule.
    once = normalize(text)
    assert normalize(once) == once


@pytest.mark.parametrize(
    ("output", "reference", "equal", "contained"),
    [
        ("Paris.", "paris", 1, 1),
        ("It is Paris", "Paris", 0, 1),
        ("parish", "paris", 0, 1),  # HELMET's rule: inside a word counts
        ("London", "Paris", 0, 0),
        ("", "Paris", 0, 0),
    ],
)
def test_equal_and_contained(output: str, reference: str, equal: float, contained: float):
    assert exact_match(output, reference) == exact_match_reference(output, reference) == equal
    assert sub_em(output, reference) == sub_em_reference(output, reference) == contained


def test_a_reference_that_normalizes_to_nothing_is_in_every_output_only_in_reference_mode():
    assert sub_em_reference("", "The") == exact_match_reference("", "A") == 1
    assert sub_em("", "The") == exact_match("", "A") == 0
    assert sub_em("so the answer", "The") == exact_match("a", "A") == 1


def test_the_cue_counts_as_output_only_in_reference_mode():
    question = Question(context="", question="", prefix="Answer:", references=("answer",), meta={"mode": "reference"})
    assert rag.score("", question) == 1
    assert rag.score("", replace(question, meta={"mode": "fixed"})) == 0


def test_f1_by_hand():
    assert shared_f1(["cat", "sat"], ["cat", "ran"]) == pytest.approx(0.5)  # one of two words each
    assert shared_f1(["cat", "cat"], ["cat"]) == pytest.approx(2 / 3)  # a multiset
    assert shared_f1([], ["cat"]) == shared_f1(["cat"], []) == shared_f1([], []) == 0


words = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=8)


@given(words, words)
def test_f1_is_symmetric_and_one_only_for_the_same_words(ours: list[str], theirs: list[str]):
    score = shared_f1(ours, theirs)
    assert score == pytest.approx(shared_f1(theirs, ours))
    assert 0 <= score <= 1
    assert (score == 1) == (bool(ours) and sorted(ours) == sorted(theirs))


def test_the_best_reference_counts_and_none_scores_nothing():
    assert best(exact_match, "red fox", ["dog", "red fox"]) == 1
    assert best(exact_match, "red fox", []) == 0


@pytest.mark.parametrize(
    ("output", "parsed"),
    [
        (" Paris\nQuestion: next", "Paris"),
        ("Well.\nANSWER: Rome \nmore", "Rome"),
        ("Answer: Answer: Rome", "Rome"),
        ("", ""),
        ("\nRome", ""),
    ],
)
def test_parsing_takes_what_follows_the_cue_or_the_first_line(output: str, parsed: str):
    assert parse_answer(output) == parsed


def test_raw_or_parsed_takes_the_better_of_both():
    rambling = " Rome\nQuestion: who? Answer: Nero"
    assert exact_match(rambling, "Rome") == 0
    assert raw_or_parsed(exact_match, rambling, ["Nero"], "Answer:") == 1
    assert raw_or_parsed(exact_match_reference, "Answer:" + rambling, ["Rome"], "Answer:") == 1


def test_without_the_guard_an_empty_output_would_score(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(answers, "_comparable", lambda text, reference: normalize(text))
    assert exact_match("", "A") == 1
