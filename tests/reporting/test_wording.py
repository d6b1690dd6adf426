import pytest

from unspool.core.formatting import clip, excerpt, format_bytes, format_duration, format_percent, join_words
from unspool.reporting.measures import format_difference, format_with_interval, lowercase_start
from unspool.reporting.page import keep_together
from unspool.reporting.run_results import Cell


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0, "0%"), (0.004, "0.4%"), (0.845, "84%"), (0.996, "99.6%"), (1, "100%")]
)
def test_percents_never_claim_all_or_nothing_by_rounding(value: float | None, text: str):
    assert format_percent(value) == text


def test_values_carry_their_interval_and_missing_ones_a_dash():
    recall = Cell(suite="niah", metric="accuracy", length=2048, value=0.85, n=40, low=0.71, high=0.93)
    alone = Cell(suite="perplexity", metric="loss", length=2048, start=0, stop=64, value=3.702, n=64)

    assert format_with_interval(recall) == "85% (71–93)"
    assert format_with_interval(alone) == "3.70"
    assert format_with_interval(None) == "–"


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.24, "1.2 s"), (70.1, "1 min 10 s"), (59.99, "1 min 0 s"), (98000, "27 h 13 min")]
)
def test_durations_read_naturally(seconds: float, text: str):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (14100, "14.1 KB"), (999_999, "1 MB"), (3.2e12, "3.2 TB")])
def test_bytes_read_naturally(size: float, text: str):
    assert format_bytes(size) == text


def test_lists_are_joined_with_commas_and_and():
    assert [join_words(list(names)) for names in ("", "a", "ab", "abc")] == ["", "a", "a and b", "a, b and c"]


def test_model_output_is_clipped_and_its_control_characters_show():
    assert excerpt(" a\nb\tc\x00\x7f\u202e ") == "a\nb\tc\u2400\u2421⟨U+202E⟩"
    assert excerpt("x" * 250) == "x" * 240 + "… (+10 characters)"


def test_numbers_do_not_break_over_lines():
    assert " " not in keep_together("n = 40")
    assert keep_together("1K–2K").replace("\u2060", "") == "1K–2K"


@pytest.mark.parametrize(
    ("value", "is_loss", "text"),
    [(0.123, False, "+12"), (-0.5, False, "−50"), (0.003, False, "+0.3"), (0.0, False, "0"), (-0.0512, True, "−0.051")],
)
def test_differences_carry_their_sign_and_never_round_to_none(value: float, is_loss: bool, text: str):
    assert format_difference(value, is_loss=is_loss) == text


def test_names_keep_their_capitals_inside_a_sentence():
    assert lowercase_start("Needle recall at 2K") == "needle recall at 2K"
    assert lowercase_start("RULER at 2K") == "RULER at 2K"
    assert clip("recall-256", 6) == "recal…"
