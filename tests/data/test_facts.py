import json

import numpy as np
import pytest

from unspool.core.errors import DataError
from unspool.data import facts
from unspool.data.facts import distinct_keys, fact, pair_question, pairs_text, question, single_token_words, word_list


class LengthTokenizer:
    """One token per three characters, counting a leading space."""

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[0] * -(-len(text) // 3) for text in texts]}


def test_a_question_and_its_answer_restate_the_fact():
    assert fact("stone", "river", "word") == "The special magic word for stone is river."
    answered = question("stone", "word") + " " + "river."
    assert answered == "What is the special magic word for stone? The special magic word for stone is river."
    assert answered.endswith(fact("stone", "river", "word"))


def test_pairs_are_json_in_the_order_given():
    text = pairs_text([("stone", "lamp"), ("apple", "river")])

    assert text == '{"stone": "lamp", "apple": "river"}'


def test_a_pair_question_is_a_separate_line_and_ends_where_the_value_begins():
    asked = pair_question("stone")

    assert asked.startswith("\n") and asked.endswith('"') and '"stone"' in asked
    assert not asked.endswith('""')


def test_the_shipped_words_are_distinct_lower_case_words():
    words = word_list()

    assert len(words) >= 256
    assert len(set(words)) == len(words)
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_a_missing_word_list_is_a_sentence_not_a_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(facts, "files", lambda package: tmp_path)

    with pytest.raises(DataError, match=r"words\.txt cannot be read"):
        word_list()


def test_only_words_that_are_one_token_with_and_without_a_space_remain():
    short = [a + b for a in "abcdefgh" for b in "klmnopqr"]  # 64 words of two letters
    three = ["sky", "oak"]  # one token bare, two with a space before them

    assert single_token_words(LengthTokenizer(), [*three, *short, "horse"]) == short


def test_all_words_remain_when_too_few_are_one_token():
    words = ["it", "horse", "river"]

    assert single_token_words(LengthTokenizer(), words) == words


@pytest.mark.parametrize("count", [0, 3, 5, 12, 30, 60])
def test_keys_are_distinct_at_any_count_and_plain_while_words_last(count):
    words = ["one", "two", "three", "four", "five"]

    keys = distinct_keys(words, count, np.random.default_rng(0))

    assert len(keys) == len(set(keys)) == count
    assert all(key in words for key in keys[: len(words)])
    assert all("-" in key for key in keys[len(words) :])
    assert all(part in words for key in keys for part in key.split("-"))
    assert json.loads(pairs_text([(key, "") for key in keys])) == dict.fromkeys(keys, "")
