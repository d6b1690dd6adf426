import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.core.errors import ConfigError
from unspool.data.mixture import MOST_EPOCHS, PERIOD, Mix, epoch_warnings


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


mixes = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=7
)


@settings(max_examples=25, deadline=None)
@given(mixes, st.integers(0, 3))
def test_every_prefix_of_any_mix_has_exact_shares_to_within_one_slot_and_uses_sets_up(entries, seed):
    """Weights in whole numbers repeat within a period, so nothing is rounded, however long the run is."""
    names = [f"set{number}" for number in range(len(entries))]
    weights = dict(zip(names, (weight for weight, _, _ in entries), strict=True))
    sizes = dict(zip(names, (size for _, size, _ in entries), strict=True))
    row_lens = dict(zip(names, (length for _, _, length in entries), strict=True))
    total = sum(weights.values())
    mix = Mix(weights, sizes, row_lens, 8, seed)

    used: dict[str, list[int]] = {name: [] for name in names}
    slots_of = dict.fromkeys(names, 0)
    for index in range(200):
        picks = mix.slot(index)
        assert len({name for name, _ in picks}) == 1
        name = picks[0][0]
        assert len(picks) * row_lens[name] == 8
        slots_of[name] += 1
        used[name] += [row for _, row in picks]
        for other, count in slots_of.items():
            assert abs(count * total - weights[other] * (index + 1)) < total
    for name, rows in used.items():
        for start in range(0, len(rows), sizes[name]):
            epoch = rows[start : start + sizes[name]]
            assert len(set(epoch)) == len(epoch), "a row returned before the set was used up"
    assert mix.epochs(200) == pytest.approx({name: len(rows) / sizes[name] for name, rows in used.items()})


def test_shares_that_repeat_are_exact_even_after_a_billion_slots():
    mix = build({"a": 1, "b": 2})
    assert mix.epochs(3 * 10**9) == {"a": 10**9 / 50, "b": 2 * 10**9 / 50}


def test_steps_take_the_same_rows_on_any_number_of_ranks():
    mix = build({"a": 0.6, "b": 0.4})
    for step in range(10):
        together = [mix.slot(step * 8 + inner) for inner in range(8)]
        for ranks in (1, 2, 4, 8):
            each = [
                [build({"a": 0.6, "b": 0.4}).slot(step * 8 + inner) for inner in range(rank, 8, ranks)]
                for rank in range(ranks)
            ]
            assert sorted(pick for slots in each for pick in slots) == sorted(together)


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


def test_an_epoch_continues_across_the_end_of_the_pattern():
    mix = build({"a": 0.7, "b": 0.3}, size=2 * PERIOD)
    rows = [mix.slot(index)[0] for index in range(2 * PERIOD)]
    assert len(set(rows)) == len(rows)


def slots(mix, indices):
    return [mix.slot(index) for index in indices]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 10**12) | st.integers(0, 300), min_size=1, max_size=50), st.integers(0, 5))
def test_a_slot_does_not_depend_on_the_order_of_requests(indices, seed):
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    asked = slots(build(weights, seed=seed), indices)
    assert asked == slots(build(weights, seed=seed), reversed(indices))[::-1]


def test_the_order_depends_on_the_seed_and_not_on_how_the_mix_was_written_down():
    there = slots(build({"a": 0.6, "b": 0.4}), range(50))
    assert there == slots(build({"b": 0.4, "a": 0.6}), range(50))
    assert there != slots(build({"a": 0.6, "b": 0.4}, seed=1), range(50))


def test_stages_that_tell_their_names_see_different_rows_first():
    names = {"a": 1.0}
    plain = Mix(names, {"a": 500}, {"a": 16}, 16, 0)
    first, second = (Mix(names, {"a": 500}, {"a": 16}, 16, 0, stage=stage) for stage in ("one", "two"))
    orders = [[mix.slot(index)[0][1] for index in range(500)] for mix in (plain, first, second)]
    assert all(sorted(order) == list(range(500)) for order in orders)
    assert sum(len(set(order[:100])) for order in orders) == 300
    assert len({tuple(order) for order in orders}) == 3
    unnamed = slots(Mix(names, {"a": 500}, {"a": 16}, 16, 0, stage=""), range(500))
    assert unnamed == slots(plain, range(500)), "the order of runs without names must not change"


def test_a_curriculum_mixes_one_long_document_with_eight_shorter_ones():
    lens = {"repos-512k": 512 << 10, "repos-64k": 64 << 10}
    mix = Mix({"repos-512k": 0.5, "repos-64k": 0.5}, {"repos-512k": 5, "repos-64k": 40}, lens, 512 << 10, 0)
    filled = [mix.slot(index) for index in range(10)]
    assert [len(picks) for picks in filled].count(1) == 5
    assert [len(picks) for picks in filled].count(8) == 5
    assert all(sum(lens[name] for name, _ in picks) == 512 << 10 for picks in filled)
    assert len({pick for picks in filled for pick in picks}) == 45, "every row of both was used once"


def test_repeated_rows_are_warned_of():
    epochs = build({"a": 0.9, "b": 0.1}, size=100).epochs(500)
    assert epochs == {"a": 4.5, "b": 0.5}
    (warning,) = epoch_warnings(epochs)
    assert warning.startswith("rows a are repeated 4.5 times, and repetitions beyond 4 add little")
    assert epoch_warnings({"a": MOST_EPOCHS}) == []
    assert len(epoch_warnings(epochs, most=0.1)) == 2


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
    with pytest.raises(
        ConfigError, match="rows a have 24 tokens, which does not divide the stage's context length of 64"
    ):
        build({"a": 1.0}, row_len=24, context=64)


def test_an_empty_set_is_refused():
    with pytest.raises(ConfigError, match="rows a hold no row"):
        build({"a": 1.0}, size=0)
