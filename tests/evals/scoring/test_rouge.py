"""ROUGE-L: stems, common subsequences and F1 by hand and by another way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.evals.scoring import rouge
from unspool.evals.scoring.rouge import common_length, rouge_l, rouge_words, stem, words_rouge_l


@pytest.mark.parametrize(
    ("word", "stemmed"),
    [
        # Porter's own examples of every step, and NLTK's changes.
        *[("caresses", "caress"), ("ponies", "poni"), ("ties", "tie"), ("cats", "cat"), ("agreed", "agre")],
        *[("feed", "feed"), ("plastered", "plaster"), ("bled", "bled"), ("motoring", "motor"), ("sing", "sing")],
        *[("conflated", "conflat"), ("troubled", "troubl"), ("sized", "size"), ("hopping", "hop"), ("falling", "fall")],
        *[("hissing", "hiss"), ("filing", "file"), ("happy", "happi"), ("enjoy", "enjoy"), ("sky", "sky")],
        *[("relational", "relat"), ("conditional", "condit"), ("vietnamization", "vietnam"), ("operator", "oper")],
        *[("triplicate", "triplic"), ("hopeful", "hope"), ("goodness", "good"), ("revival", "reviv")],
        *[("adoption", "adopt"), ("probate", "probat"), ("rate", "rate"), ("controlling", "control"), ("dying", "die")],
        *[
            ("geology", "geolog"),
            ("died", "die"),
            ("tried", "tri"),
            ("by", "by"),
            ("news", "news"),
            ("innings", "inning"),
        ],
    ],
)
def test_stems(word: str, stemmed: str):
    assert stem(word) == stemmed


def test_words_are_runs_of_letters_and_digits_and_short_ones_keep_their_form():
    assert rouge_words("Dogs' cats, was 1999-2000 naïve!") == ["dog", "cat", "was", "1999", "2000", "na", "ve"]


def slow_common(ours: list[str], theirs: list[str]) -> int:
    rows = [[0] * (len(theirs) + 1) for _ in range(len(ours) + 1)]
    for i, mine in enumerate(ours):
        for j, yours in enumerate(theirs):
            rows[i + 1][j + 1] = rows[i][j] + 1 if mine == yours else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


words = st.lists(st.sampled_from("abcd"), max_size=80)


@given(words, words)
def test_the_bit_parallel_subsequence_is_as_long_as_the_table_says(ours: list[str], theirs: list[str]):
    assert common_length(ours, theirs) == slow_common(ours, theirs)


def test_f1_by_hand():
    assert rouge_l("the cat sat on the mat", "the cat was on the mat") == pytest.approx(5 / 6)
    assert rouge_l("mat the on sat cat the", "the cat sat on the mat") == pytest.approx(3 / 6)  # order counts
    assert rouge_l("", "the cat") == rouge_l("the cat", "") == 0
    assert rouge_l("running dogs", "run dog") == pytest.approx(1.0)  # "running" loses its ending


@given(words, words)
def test_f1_is_symmetric_and_bounded(ours: list[str], theirs: list[str]):
    assert words_rouge_l(ours, theirs) == pytest.approx(words_rouge_l(theirs, ours))
    assert 0 <= words_rouge_l(ours, theirs) <= 1


def test_counting_shared_words_instead_of_a_subsequence_would_show(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rouge, "common_length", lambda ours, theirs: len(set(ours) & set(theirs)))
    assert rouge_l("mat the on sat cat the", "the cat sat on the mat") != pytest.approx(3 / 6)
