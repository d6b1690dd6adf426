import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.data.strategies.pose import PoSE, skip_positions


def stretches(positions: np.ndarray, lens: list[int]) -> list[np.ndarray]:
    return np.split(positions, np.cumsum(lens)[:-1])


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(2, 6),
    st.integers(1, 300),
    st.integers(0, 2**31),
)
@settings(max_examples=300, deadline=None)
def test_positions_begin_at_0_rise_and_stay_below_the_target(lens, chunks, more, seed):
    config = PoSE(target=max(lens) + more, chunks=chunks)
    positions = skip_positions(np.array(lens, dtype=np.int32), config, np.random.default_rng(seed))

    assert positions.dtype == np.int32
    assert len(positions) == sum(lens)
    for part in stretches(positions, lens):
        steps = np.diff(part)
        assert part[0] == 0
        assert part[-1] < config.target
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= chunks - 1
    again = skip_positions(np.array(lens, dtype=np.int32), config, np.random.default_rng(seed))
    assert again.tolist() == positions.tolist()


def test_several_rows_at_once_give_the_same_as_one_row_at_a_time():
    config = PoSE(target=500, chunks=3)
    rows = [np.array([5, 20]), np.array([25]), np.array([1, 1, 23])]
    rng = np.random.default_rng(3)
    single = np.concatenate([skip_positions(lens, config, rng) for lens in rows])
    assert skip_positions(np.concatenate(rows), config, np.random.default_rng(3)).tolist() == single.tolist()


def test_two_chunks_jump_once_anywhere_by_any_skip_up_to_target_minus_length():
    rng = np.random.default_rng(0)
    positions = skip_positions(np.full(4000, 8), PoSE(target=28), rng).reshape(4000, 8)
    skips = positions[:, -1] - 7
    cuts = (np.diff(positions, axis=1) > 1).argmax(axis=1)[skips > 0]

    shares = np.bincount(skips, minlength=21) / 4000
    assert len(shares) == 21, "from 0 to 28 - 8"
    assert shares == pytest.approx(np.full(21, 1 / 21), abs=0.015)
    assert np.bincount(cuts, minlength=7) / len(cuts) == pytest.approx(np.full(7, 1 / 7), abs=0.025)


@pytest.mark.parametrize("chunks", [2, 4])
def test_all_distances_below_the_target_occur(chunks):
    positions = skip_positions(np.full(3000, 16), PoSE(target=64, chunks=chunks), np.random.default_rng(0))
    rows = positions.reshape(3000, 16)
    distances = (rows[:, :, None] - rows[:, None, :]).ravel()
    assert set(range(64)) <= set(distances.tolist())
