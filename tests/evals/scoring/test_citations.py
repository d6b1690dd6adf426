"""Citations by hand, with an entailment that is told what entails what."""

import pytest

from unspool.evals.scoring import citations as cite
from unspool.evals.scoring.citations import (
    CitationScore,
    citations,
    claims_of,
    one_line,
    qampari,
    remove_citations,
    sentences,
    str_em,
)

DOCUMENTS = ["Title: a\nred", "Title: b\ngreen", "Title: c\nblue"]


def entails(premise: str, claim: str) -> bool:
    """Every colour that the claim names stands in the premise."""
    return all(colour in premise for colour in ("red", "green", "blue") if colour in claim)


def cited(*claims: str, mode: cite.Mode = "fixed") -> CitationScore | None:
    return citations(claims, DOCUMENTS, entails, mode)


def test_a_sentence_counts_if_what_it_cites_entails_it():
    assert cited("It is red [1].", "It is green [1].", "It is blue.") == CitationScore(1 / 3, 1 / 2)


def test_a_citation_is_needed_if_it_entails_alone_or_the_others_do_not():
    assert cited("It is red and green [1][2].") == CitationScore(1, 1)
    assert cited("It is red [1][3].") == CitationScore(1, 1 / 2)  # the third adds nothing
    assert cited("It is red [2][3].") == CitationScore(0, 0)


def test_only_the_first_three_citations_count():
    documents = [*DOCUMENTS, "Title: d\nred"]
    found = citations(["It is red [2][3][2][4]."], documents, entails)
    assert found == CitationScore(0, 0)


def test_what_the_reference_does_wrong():
    assert cited(mode="reference") is None  # no sentence: left out of the mean
    assert cited() == CitationScore(0, 0)
    assert cited("It is blue [0].", mode="reference") == CitationScore(1, 1)  # "[0]" is the last document
    assert cited("It is blue [0].") == CitationScore(0, 0)
    outside = ("It is red [1].", "It is green [2][9].")
    assert cited(*outside, mode="reference") == CitationScore(1 / 2, 1)  # a made-up citation costs no precision
    assert cited(*outside) == CitationScore(1 / 2, 1 / 3)


def test_sentences_keep_the_marks_that_follow_them():
    text = "One is red [1]. Two is green.[2] Three is blue. [3] 4 of them are grey! So?"
    assert sentences(text) == [
        "One is red [1].",
        "Two is green.[2]",
        "Three is blue. [3]",
        "4 of them are grey!",
        "So?",
    ]
    assert claims_of("1. It is red.", question=None) == ["It is red."]
    assert claims_of("red [1], blue [2].", question="Which?") == ["Which? red [1]", "Which? blue [2]"]


def test_marks_and_newlines_are_removed_before_the_search_for_answers():
    assert remove_citations("Red [1][2] and blue[3].") == "Red and blue."
    assert one_line("a\n\nb<|im_end|>") == "a b"


def test_asqa_and_qampari_by_hand():
    assert str_em("Founded by Ada\nin 1900 [1].", [["Ada", "Eve"], ["1901"]]) == 0.5
    found = qampari("Ada [1], Eve [2], Bob.", [["Ada"], ["Eva", "Eve"], ["Zoe"]])
    assert found == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "recall_top5": 2 / 3})
    many = [[name] for name in "abcdefgh"]
    assert qampari("b, c, d, e, f, g", many)["recall_top5"] == 1
    assert qampari("", many) == {"precision": 0, "recall": 0, "recall_top5": 0}


# Scores by princeton-nlp/HELMET's eval_alce.py and princeton-nlp/ALCE's eval.py of outputs with several lines
# (tests/evals/helmet/test_beside_alce.py runs both).
LISTED = "Ada [1], Eve [2], Bob [3], Cy [1], Zoe [2], Ann, Tom, Jim,\nKim, Lou, Max, Pat.\n"
SPLIT = "\nAda [1], Eve\n\nBob, Cy"
GOLD = [["Ada"], ["Eve"], ["Bob"], ["Cy"], ["Zoe"], ["Fay"], ["Gus"], ["Hal"]]


@pytest.mark.parametrize(
    ("script", "output", "precision", "recall", "recall_top5"),
    [
        ("helmet", LISTED, 5 / 12, 5 / 8, 1),
        ("alce", LISTED, 5 / 8, 5 / 8, 1),
        ("helmet", SPLIT, 2 / 3, 2 / 8, 2 / 5),  # "Eve Bob" is one item
        ("alce", SPLIT, 1, 2 / 8, 2 / 5),
    ],
    ids=["helmet, more lines", "alce, more lines", "helmet, split item", "alce, split item"],
)
def test_helmet_reads_all_lines_alce_the_first(script, output, precision, recall, recall_top5):
    expected = {"precision": precision, "recall": recall, "recall_top5": recall_top5}
    assert qampari(output, GOLD, script) == pytest.approx(expected)


def test_alce_keeps_short_sentences_that_helmet_skips():
    text = "1. It is red [1].\nIt is blue [3]."
    assert claims_of(text, question=None, script="alce") == ["1.", "It is red [1]."]
    assert claims_of(text, question=None) == ["It is red [1].", "It is blue [3]."]


def test_an_answer_that_normalizes_to_nothing_is_in_every_output_of_the_reference():
    assert str_em("Red.", [["The"], ["blue"]], "reference") == 0.5
    assert str_em("Red.", [["The"], ["blue"]]) == 0


def test_counting_every_citation_as_needed_would_show(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cite, "_needed", lambda *_: True)
    assert cited("It is red [1][3].") != CitationScore(1, 1 / 2)
