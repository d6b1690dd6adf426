"""Pairs, adaptation rate and effective length: what is known, and what is not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.evals.scoring import effective_length as reach
from unspool.evals.scoring.effective_length import adaptation_rate, effective_length
from unspool.evals.scoring.ranking import pair_accuracy, parse_verdict


def test_both_claims_of_a_pair_must_be_right():
    found = pair_accuracy([("a", 1.0), ("b", 1.0), ("a", 1.0), ("b", 0.0), ("c", None), ("c", 1.0), ("d", 1.0)])
    assert (found.value, found.n, found.missing) == (0.5, 2, 2)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.5 < found.high
    assert pair_accuracy([]).value is None


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        (" True.", True),
        ("FALSE, since it is not true", False),
        ("<explanation>true or false?</explanation><answer>FALSE</answer>", False),
        ("untrue", None),
        ("", None),
    ],
)
def test_a_verdict_is_read(output: str, verdict: bool | None):
    assert parse_verdict(output) is verdict


def test_the_rate_by_hand():
    rate = adaptation_rate([1, 0, None, 1, 0], [1, 1, 1, 0, 1])
    assert (rate.value, rate.n_target, rate.n_reference) == (pytest.approx(0.5 / 0.8), 4, 5)
    assert rate.low is not None
    assert rate.high is not None
    assert 0 <= rate.low < 0.625 < rate.high


@pytest.mark.parametrize(("target", "reference"), [([], [1.0]), ([1.0], []), ([1.0], [0.0]), ([None], [1.0])])
def test_what_cannot_be_known_is_none(target: list[float | None], reference: list[float | None]):
    rate = adaptation_rate(target, reference)
    assert rate.value is rate.low is rate.high is None


@settings(deadline=None, max_examples=20)  # each takes thousands of resamples
@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30), st.integers(0, 3))
def test_the_interval_is_the_same_each_time_and_holds_a_rate_of_equal_lists(scores: list[float], seed: int):
    rate = adaptation_rate(scores, [1.0], seed=seed)
    assert rate == adaptation_rate(scores, [1.0], seed=seed)
    assert rate.low is not None
    assert rate.high is not None
    assert rate.low - 1e-9 <= rate.value <= rate.high + 1e-9  # type: ignore[operator]


def test_the_effective_length_ends_at_the_first_length_below_the_threshold():
    scores = {4096: [1.0] * 9 + [0.0], 8192: [1.0], 16384: [0.5], 32768: [1.0]}
    assert effective_length(scores) == 8192  # what holds again beyond a gap does not count
    assert effective_length({4096: [0.5], 8192: [1.0]}) is None
    assert effective_length({}) is effective_length({4096: []}) is effective_length({4096: [None]}) is None
    assert effective_length({4096: [1.0], 8192: [None], 16384: [0.9]}) == 16384
    assert effective_length({4096: [0.9, 0.8]}) is None
    assert effective_length({4096: [0.9, 0.8]}, threshold=0.8) == 4096


def test_missing_taken_for_zero_would_show(monkeypatch: pytest.MonkeyPatch):
    plain = reach._known
    monkeypatch.setattr(reach, "_known", lambda scores: plain([score or 0.0 for score in scores]))
    assert adaptation_rate([1, 0, None, 1, 0], [1, 1, 1, 0, 1]).value != pytest.approx(0.5 / 0.8)


def test_every_task_weighs_the_same_whatever_its_samples():
    target = {"often": [1.0] * 90, "seldom": [0.0, 0.0], "unknown": [1.0], "empty": []}
    rate = adaptation_rate(target, {"often": [1.0] * 10, "seldom": [1.0, 1.0], "empty": [1.0]})

    assert (rate.value, rate.n_target, rate.n_reference) == (0.5, 92, 12), "tasks known at one length only do not count"
    pooled = adaptation_rate([1.0] * 90 + [0.0] * 2, [1.0] * 12)
    assert pooled.value == pytest.approx(90 / 92)


def test_single_samples_of_several_tasks_give_no_interval():
    rate = adaptation_rate({"a": [1.0], "b": [0.0]}, {"a": [1.0], "b": [1.0]})

    assert (rate.value, rate.low, rate.high) == (0.5, None, None)


def test_the_interval_over_tasks_has_the_width_that_repetitions_show():
    """Twelve tasks of three samples each, all right half of the time: the truth is 1."""
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        drawn = [{str(task): rng.integers(2, size=3).tolist() for task in range(12)} for _ in range(2)]
        rate = adaptation_rate(*drawn, seed=trial)
        assert rate.low is not None and rate.high is not None
        inside += rate.low <= 1 <= rate.high

    assert 0.90 <= inside / 200 <= 0.99
