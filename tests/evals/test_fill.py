"""Filling: never beyond the limit, close to it where pieces allow, bounded work, depths spread evenly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.evals.suites import byte_tokenizer

from unspool.core.errors import ConfigError
from unspool.evals import fill
from unspool.evals.fill import Meter, Remembered, room, spread
from unspool.evals.suite import Ask, Question


@pytest.fixture(scope="module")
def meter() -> Meter:
    return Meter(byte_tokenizer(), ["some text"])


def test_tokens_are_counted_as_the_tokenizer_counts_them(meter: Meter):
    assert meter.count("four") == 4
    assert meter.count("né") == 3  # bytes
    whole = Question(context="ab", question="cd", prefix="e", references=())
    assert meter.whole(whole) == 5


def test_a_text_is_cut_after_a_whole_word(meter: Meter):
    assert meter.clip("one two three", 8) == "one two"
    assert meter.clip("one two three", 2) == ""
    assert meter.clip("one two three", 8, keep=2) == ""  # only its head would be left


def test_pieces_are_taken_whole_and_the_last_is_cut(meter: Meter):
    assert meter.take(["aa", "bb", "cc dd"], 8, between=1) == ["aa", "bb"]
    assert meter.take(["aa", "bb", "cc dd"], 9, between=1) == ["aa", "bb", "cc"]
    assert meter.take(["aa"], 99) == ["aa"]
    # Too little for a head of one word: the last piece is halved to make room for it.
    assert meter.take(["a bb cc dd", "x yy zz"], 12, keep=1) == ["a bb", "x yy zz"]


def test_texts_are_generated_once_and_only_on_access():
    made: list[int] = []

    def texts():
        for at in range(100):
            made.append(at)
            yield str(at)

    lazy = Remembered(texts())
    assert [text for text, _ in zip(lazy, range(3), strict=False)] == ["0", "1", "2"]
    assert len(list(lazy)) == len(list(lazy)) == 100
    assert made == list(range(100))


@settings(deadline=None)
@given(st.integers(0, 400), st.lists(st.integers(1, 60), max_size=30), st.integers(-5, 5))
def test_nothing_exceeds_the_limit(limit: int, sizes: list[int], wrong: int):
    """Whatever the pieces are, and however wrong the builder's own estimate is."""
    counter = _METER
    built = 0

    def build(budget: int) -> Question:
        nonlocal built
        built += 1
        text = "".join(counter.take(["x" * size + " " for size in sizes], budget + wrong))
        return Question(context=text, question="why? ", references=())

    try:
        asked = fill.fill(build, counter, limit, what="test", length=limit)
    except ConfigError:
        assert limit < 5 + 5  # the question alone, and what the estimate is wrong by
    else:
        assert counter.whole(asked) <= limit
    assert built <= fill.MAX_TRIALS + 2 * fill.MAX_NEIGHBORS + 2


_METER = Meter(byte_tokenizer(), ["some text"])


def test_the_room_leaves_out_answer_and_overhead():
    assert room(Ask(length=100, seed=0, index=0, overhead=7), 20) == 73


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 1000))
def test_any_eight_consecutive_depths_cover_all_eighths(start: float, first: int):
    depths = [(spread(index, start) - start) % 1 for index in range(first, first + 8)]
    assert sorted(np.floor(np.array(depths) * 8 + 1e-6).astype(int) % 8) == list(range(8))


def test_a_random_depth_would_show(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(fill, "spread", lambda index, start: float(rng.random()))
    depths = [fill.spread(index, 0.0) for index in range(8)]
    assert len(set(np.floor(np.array(depths) * 8).astype(int))) < 8
