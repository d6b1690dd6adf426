from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.data.strategies.upsample import Upsample, draw_uses, is_again, spread

LENS = np.random.default_rng(1).integers(1, 8000, size=20_000)


def test_long_documents_are_used_so_many_times_and_short_ones_kept_so_often():
    config = Upsample(above=4096, times=2.25, keep=0.1)
    uses = draw_uses(LENS, config, np.random.default_rng(0))

    is_long = LENS >= 4096
    assert set(uses[is_long].tolist()) == {2, 3}
    assert uses[is_long].mean() == pytest.approx(2.25, abs=0.02)
    assert set(uses[~is_long].tolist()) == {0, 1}
    assert uses[~is_long].mean() == pytest.approx(0.1, abs=0.01)


def test_a_document_of_exactly_the_threshold_is_long():
    uses = draw_uses(np.array([9, 10, 11]), Upsample(above=10, times=3), np.random.default_rng(0))
    assert uses.tolist() == [1, 3, 3]


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(0, 2**31))
@settings(max_examples=300, deadline=None)
def test_every_use_is_in_the_order_once_and_the_seed_decides(uses, seed):
    order = spread(np.array(uses, dtype=np.int64), np.random.default_rng(seed))

    assert np.bincount(order, minlength=len(uses)).tolist() == uses
    assert order.tolist() == spread(np.array(uses, dtype=np.int64), np.random.default_rng(seed)).tolist()
    firsts = order[~is_again(order)]
    assert sorted(firsts.tolist()) == [doc for doc, count in enumerate(uses) if count]


def gaps(order: np.ndarray) -> np.ndarray:
    """The distance of each copy from the previous one."""
    by_doc = np.argsort(order, kind="stable")
    same = np.diff(order[by_doc]) == 0
    return np.diff(by_doc)[same]


def test_copies_lie_apart():
    order = spread(np.repeat([5, 1], [500, 2000]), np.random.default_rng(0))
    # A fifth of the way is even; half of that is promised, and a random order wavers a little.
    assert len(gaps(order)) == 4 * 500
    assert gaps(order).min() > 0.09 * len(order)


def test_copies_meet_other_neighbours():
    order = spread(np.full(500, 4), np.random.default_rng(0))
    after = set(pairwise(order.tolist()))
    assert len(after) > 0.95 * (len(order) - 1), "the same sequence over and over would be four times the same rows"


def test_the_first_part_of_the_order_is_mixed_like_the_whole():
    order = spread(np.repeat([5, 1], [500, 2500]), np.random.default_rng(0))
    assert (order[:500] < 500).mean() == pytest.approx(0.5, abs=0.06)
