import pytest

from unspool.evals.scoring.answers import score_answer

UUID = "3f2b8c1e-0d4a-4f6b-9a57-1c2d3e4f5a6b"


@pytest.mark.parametrize(
    "output", [" river.", "river", "River\n", '  RIVER", "stone": "lamp"', "river, lamp", "river's"]
)
def test_a_word_that_comes_first_counts(output):
    assert score_answer(output, "river", "start") == 1.0


@pytest.mark.parametrize(
    "output",
    [
        "",
        " ",
        "lamp, river",  # lists what it has seen
        "the river",
        "riverbank",
        "river_bank",
        "river-bank",  # another key's value
        "riv er",
        '"river"',  # the quote was already opened
    ],
)
def test_a_word_that_does_not_come_first_and_whole_does_not_count(output):
    assert score_answer(output, "river", "start") == 0.0


@pytest.mark.parametrize(
    "output", [" 1234567.", "the number is 1234567", '1234567"', "\n 1234567", "(1234567)\n7654321"]
)
def test_a_number_on_the_first_line_counts(output):
    assert score_answer(output, "1234567", "contains") == 1.0


@pytest.mark.parametrize("output", ["", "12345678", "91234567", "1234 567", "7654321\n1234567", "1234567-8", "123456"])
def test_a_number_that_is_incomplete_longer_or_later_does_not_count(output):
    assert score_answer(output, "1234567", "contains") == 0.0


def test_a_uuid_counts_only_whole():
    assert score_answer(f'{UUID}",', UUID, "contains") == 1.0
    assert score_answer(UUID.upper(), UUID, "contains") == 1.0
    assert score_answer(UUID[:-1], UUID, "contains") == 0.0
    assert score_answer(f"{UUID}-x", UUID, "contains") == 0.0


def test_a_reference_is_text_not_a_pattern():
    assert score_answer("axb", "a.b", "start") == 0.0
    assert score_answer("a.b", "a.b", "contains") == 1.0
