from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.data.mixture import ModelShape, arrange, imbalance, row_cost

SHAPE = ModelShape(num_layers=2, attention_width=8, num_params=100)


def test_a_row_costs_two_operations_a_parameter_and_half_of_its_squares():
    # Scores and sums of values: 2 layers · 2 products · 2 operations · width 8 · half of n².
    assert row_cost([10], SHAPE) == 2 * 100 * 10 + 2 * 2 * 2 * 8 * 10**2 / 2
    assert row_cost(np.array([6, 4], dtype=np.int32), SHAPE) == 2 * 100 * 10 + 2 * 2 * 2 * 8 * (6**2 + 4**2) / 2


def test_squares_of_long_documents_do_not_overflow():
    assert row_cost(np.array([1 << 20], dtype=np.int32), SHAPE) == pytest.approx(200 * 2**20 + 32 * 2.0**40)


costs_and_ranks = st.integers(1, 9).flatmap(
    lambda ranks: st.integers(1, 6).flatmap(
        lambda per_rank: st.tuples(
            st.lists(st.floats(0.01, 1e6), min_size=ranks * per_rank, max_size=ranks * per_rank), st.just(ranks)
        )
    )
)


@settings(deadline=None)
@given(costs_and_ranks)
def test_every_row_is_done_once_and_every_rank_does_equally_many(case):
    costs, ranks = case
    arranged = arrange(costs, ranks)
    assert arranged.shape == (ranks, len(costs) // ranks)
    assert sorted(arranged.ravel().tolist()) == list(range(len(costs)))
    work = np.array(costs)[arranged]
    assert (np.diff(work, axis=1) <= 0).all(), "a rank's rows are not in the order of their cost"


@settings(deadline=None)
@given(costs_and_ranks)
def test_balancing_is_never_worse_than_the_given_order(case):
    costs, ranks = np.array(case[0]), case[1]
    before = imbalance(costs, np.arange(len(costs)).reshape(ranks, -1))
    after = imbalance(costs, arrange(costs, ranks))
    assert after[0] <= before[0] * (1 + 1e-12)
    assert after[1] <= before[1] * (1 + 1e-12)


def best_possible(costs: np.ndarray, ranks: int) -> tuple[float, float]:
    """The least imbalance of either kind, over all arrangements."""
    found = [imbalance(costs, np.array(order).reshape(ranks, -1)) for order in permutations(range(len(costs)))]
    return min(ranks for ranks, _ in found), min(synchronised for _, synchronised in found)


@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 2), (2, 3), (3, 2)])
def test_against_all_arrangements(ranks, per_rank):
    rng = np.random.default_rng(0)
    for _ in range(10):
        costs = rng.lognormal(0, 1, size=ranks * per_rank)
        best = best_possible(costs, ranks)
        found = imbalance(costs, arrange(costs, ranks))
        # Micro-batch by micro-batch sorting is the best there is. One row of each sorted run for every rank can cost
        # a little over the best sums, since the best sums may need two rows of one run on one rank.
        assert found[1] == pytest.approx(best[1]) or found[0] == pytest.approx(best[0])
        assert best[0] <= found[0] * (1 + 1e-12) <= 1.15 * best[0]


def test_equal_sums_are_found_where_they_exist():
    # Per rank one of each: 9 + 1, 8 + 2, 7 + 3.
    costs = np.array([9.0, 8, 7, 1, 2, 3])
    assert imbalance(costs, arrange(costs, 3))[0] == 1.0


def test_prolongs_mix_wastes_little_on_eight_ranks():
    # 63% of rows are one document of 64K, the others short ones packed; 8 ranks of 8 rows, an 8B model.
    shape = ModelShape(num_layers=32, attention_width=4096, num_params=8_000_000_000)
    rng = np.random.default_rng(0)
    lens = [np.array([65536]) if rng.random() < 0.63 else np.full(128, 512) for _ in range(64)]
    costs = np.array([row_cost(each, shape) for each in lens])
    before = imbalance(costs, np.arange(64).reshape(8, 8))
    after = imbalance(costs, arrange(costs, 8))
    assert before[1] > 1.15
    assert after[1] < 1.06
    # If 8 does not divide the long rows, some ranks always have one more than others.
    num_long = sum(len(each) == 1 for each in lens)
    most_long = -(-num_long // 8)
    assert costs[arrange(costs, 8)].sum(axis=1).max() == most_long * costs.max() + (8 - most_long) * costs.min()


def test_the_arrangement_is_the_same_every_time():
    costs = np.repeat([3.0, 1.0], 16)
    assert (arrange(costs, 4) == arrange(costs.copy(), 4)).all()


def test_rows_that_do_not_divide_are_a_bug():
    with pytest.raises(AssertionError, match="7 rows do not divide among 2 ranks"):
        arrange(np.ones(7), 2)
