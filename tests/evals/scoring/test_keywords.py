"""LV-Eval's two stages by hand, in both modes."""

import pytest

from unspool.evals.scoring import keywords
from unspool.evals.scoring.keywords import Words, filtered_rouge_l, gated_f1, keyword_recall, plain_f1

EN = Words(language="en", blacklist={"was", "of"})
ZH = Words(language="zh", blacklist={"的"}, cut=lambda text: text.split(" "))


def test_blacklisted_keywords_are_not_found_but_still_divided_by():
    assert keyword_recall(["was", "ada"], ["ada", "was", "queen", "was"], EN) == 1 / 4


@pytest.mark.parametrize("mode", ["fixed", "reference"])
def test_below_the_threshold_nothing_counts(mode: keywords.Mode):
    answer, required = "ada king lovelace wrote notes", "one two three four lovelace"
    assert gated_f1("lovelace wrote", answer, required, EN, mode) == pytest.approx(4 / 7)  # 1 of 5 is enough
    assert gated_f1("wrote notes", answer, required, EN, mode) == 0
    assert gated_f1("wrote notes", answer, None, EN, mode) > 0  # English without keywords has no gate


def test_chinese_wants_two_fifths_and_takes_the_answer_for_keywords():
    assert gated_f1("甲 乙", "甲 乙 丙 丁 戊", None, ZH) == pytest.approx(4 / 7)
    assert gated_f1("甲", "甲 乙 丙 丁 戊", None, ZH) == 0


def test_blacklisted_words_count_in_the_second_stage_only_in_reference_mode():
    output, answer = "ada was of", "ada was queen"
    assert gated_f1(output, answer, "ada", EN, "reference") == pytest.approx(2 / 3)
    assert gated_f1(output, answer, "ada", EN, "fixed") == pytest.approx(2 / 3)  # ada of [ada], of [ada, queen]
    assert gated_f1("ada was was was", answer, "ada", EN, "reference") < gated_f1("ada was was was", answer, "ada", EN)


def test_keywords_that_are_all_blacklisted_shut_everything_out_only_in_reference_mode():
    assert gated_f1("ada was queen", "ada was queen", "was of", EN, "reference") == 0
    assert gated_f1("ada was queen", "ada was queen", "was of", EN) == 1


def test_an_answer_of_blacklisted_words_keeps_them():
    assert gated_f1("was", "was", None, EN) == 1
    assert gated_f1("", "was", None, EN) == 0


def test_factrecall_is_plain_f1():
    assert plain_f1("ada was", "ada", EN) == pytest.approx(2 / 3)


def test_rouge_counts_a_repeated_word_once_only_in_reference_mode():
    assert filtered_rouge_l("甲 甲 甲 的 乙", "甲 乙", ZH, "reference") == pytest.approx(1, abs=1e-7)
    assert filtered_rouge_l("甲 甲 甲 的 乙", "甲 乙", ZH) == pytest.approx(2 / 3)
    assert filtered_rouge_l("", "甲 乙", ZH) == filtered_rouge_l("", "甲 乙", ZH, "reference") == 0


def test_texts_of_which_nothing_is_left_are_equal_for_rouge_in_reference_mode():
    assert filtered_rouge_l("， 的 ，", "， 的 。", ZH, "reference") == pytest.approx(1, abs=1e-7)
    assert filtered_rouge_l("", "， 的 。", ZH, "reference") == 0


def test_without_the_gate_a_wrong_answer_would_score(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keywords, "keyword_recall", lambda *_: 1.0)
    assert gated_f1("wrote notes", "ada wrote notes", "lovelace byron king", EN) > 0
