import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.base.errors import ConfigError
from unspool.data.mix import PERIOD, Mix


def build(weights, *, size=50, row_len=16, context=16, seed=0):
    names = list(weights)
    return Mix(weights, dict.fromkeys(names, size), dict.fromkeys(names, row_len), context, seed)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=12))
def test_every_prefix_has_each_sets_share_to_within_one_slot(weights):
    mix = build({f"set{number:02d}": weight for number, weight in enumerate(weights)})
    shares = np.array(weights) / sum(weights)
    served = [int(mix.slot(index)[0][0][3:]) for index in range(PERIOD)]
    counts = np.cumsum(np.eye(len(weights))[served], axis=0)
    slots = np.arange(1, PERIOD + 1)[:, None]
    # Rounding a share to whole slots of a period adds at most one slot over the period.
    rounded = counts[-1] / PERIOD
    assert (np.abs(counts - slots * rounded) < 1).all()
    assert (np.abs(rounded - shares) <= len(weights) / PERIOD).all()


def test_a_share_below_what_a_period_can_hold_still_gets_a_slot():
    mix = build({"big": 1.0, "small": 1e-9, "tiny": 1e-12})
    names = [mix.slot(index)[0][0] for index in range(PERIOD)]
    assert (names.count("small"), names.count("tiny")) == (1, 1)


def test_a_set_is_used_up_before_any_of_its_rows_returns_and_each_epoch_has_its_own_order():
    mix = build({"a": 0.7, "b": 0.3}, size=37, row_len=8, context=32)
    used = {"a": [], "b": []}
    for index in range(200):
        for name, row in mix.slot(index):
            used[name].append(row)
    for name, rows in used.items():
        epochs = [rows[start : start + 37] for start in range(0, len(rows) - 36, 37)]
        assert len(epochs) >= 3, name
        assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_an_epoch_goes_on_where_the_pattern_begins_again():
    mix = build({"a": 0.7, "b": 0.3}, size=2 * PERIOD)
    rows = [mix.slot(index)[0] for index in range(2 * PERIOD)]
    assert len(set(rows)) == len(rows)


def slots(mix, indices):
    return [mix.slot(index) for index in indices]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 10**12) | st.integers(0, 300), min_size=1, max_size=50), st.integers(0, 5))
def test_a_slot_is_the_same_in_whatever_order_slots_are_asked_for(indices, seed):
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    asked = slots(build(weights, seed=seed), indices)
    assert asked == slots(build(weights, seed=seed), reversed(indices))[::-1]


def test_the_order_depends_on_the_seed_and_not_on_how_the_mix_was_written_down():
    there = slots(build({"a": 0.6, "b": 0.4}), range(50))
    assert there == slots(build({"b": 0.4, "a": 0.6}), range(50))
    assert there != slots(build({"a": 0.6, "b": 0.4}, seed=1), range(50))


def test_a_slot_is_filled_by_as_many_rows_as_fit_its_context():
    mix = Mix({"a": 0.5, "b": 0.5}, {"a": 9, "b": 9}, {"a": 16, "b": 64}, 64, 0)
    sizes = {mix.slot(index)[0][0]: len(mix.slot(index)) for index in range(4)}
    assert sizes == {"a": 4, "b": 1}


@pytest.mark.parametrize("num_slots", [0, 7, PERIOD, 2 * PERIOD + 123])
def test_epochs_count_what_the_slots_use(num_slots):
    mix = build({"a": 0.7, "b": 0.3}, size=50, row_len=8, context=16)
    used = {"a": 0, "b": 0}
    for index in range(num_slots):
        for name, _ in mix.slot(index):
            used[name] += 1
    assert mix.epochs(num_slots) == pytest.approx({name: count / 50 for name, count in used.items()})


def test_rows_that_do_not_fill_a_context_are_refused():
    with pytest.raises(ConfigError, match="rows a have 24 tokens, which does not divide the stage's context of 64"):
        build({"a": 1.0}, row_len=24, context=64)


def test_an_empty_set_is_refused():
    with pytest.raises(ConfigError, match="rows a hold no row"):
        build({"a": 1.0}, size=0)
