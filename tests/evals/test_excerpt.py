import numpy as np

from unspool.evals.prompts import END_TOKENS, START_TOKENS, excerpt


class Letters:
    """A tokenizer whose ids are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + one % 26) for one in ids)


def test_a_short_prompt_is_whole_and_spans_its_parts():
    found = excerpt(Letters(), 64, [32, 64], np.arange(3), np.arange(3, 5))

    assert found == {"prompt": {"start": "abcde", "end": "", "cut_tokens": 0}}


def test_a_long_prompt_keeps_its_ends_and_counts_what_lies_between():
    ids = np.arange(1000)
    prompt = excerpt(Letters(), 2000, [2000], ids[:900], ids[900:])["prompt"]

    assert prompt["start"] == Letters().decode(ids[:START_TOKENS])
    assert prompt["end"] == Letters().decode(ids[-END_TOKENS:])
    assert START_TOKENS + prompt["cut_tokens"] + END_TOKENS == 1000


def test_shorter_lengths_keep_none():
    assert excerpt(Letters(), 32, [32, 64], np.arange(3)) == {}
