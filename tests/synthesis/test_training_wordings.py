"""Tasks that are inserted into training documents share no wording with an evaluation."""

import ast
from importlib.resources import files

import pytest

from unspool.data.sources.aggregation import passages, word_counts
from unspool.evals.suites.ruler.word_counts import FORMS
from unspool.synthesis.decontamination import MIN_WORDS, NgramIndex


@pytest.fixture(scope="module")
def evaluations() -> NgramIndex:
    """Every text in the code of the evaluations: wordings of all suites, instructions, errors, docstrings."""
    index = NgramIndex(MIN_WORDS)
    paths = list((files("unspool") / "evals").rglob("*.py"))
    for path in [*paths, files("unspool") / "data" / "facts.py"]:
        nodes = ast.walk(ast.parse(path.read_text()))
        index.add(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    assert len(paths) > 50 and index.num_texts > 500
    return index


def wordings() -> list[str]:
    questions = [text.format(word="river") for text in word_counts.QUESTIONS]
    headings = [heading.format(phrase="old mill", count=3) for heading, _ in passages.FORMS]
    return [*questions, *headings, *word_counts.HEADINGS, *word_counts.ANSWERS]


def test_no_inserted_wording_shares_six_words_in_a_row_with_an_evaluation(evaluations):
    assert [text for text in wordings() if evaluations.overlaps(text)] == []


def test_ruler_s_own_wording_would_be_noticed(evaluations):
    for task in ("cwe", "fwe"):
        for text in FORMS[task].values():
            assert evaluations.overlaps(text.own), task
    assert evaluations.overlaps("Which 10 words stand most often in the list above?")
    assert not evaluations.overlaps("Which words of this part are the most frequent ones?")


def test_no_question_asks_for_the_most_frequent_words_of_a_list():
    """RULER asks which words are the most frequent; these tasks name a word and ask for its count."""
    assert all("{word}" in text for text in word_counts.QUESTIONS)
    assert not any("most" in text or "common" in text or "list" in text for text in wordings())
