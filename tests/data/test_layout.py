from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.data.packing.modes import PADDING, PLANNERS, best_fit

lengths = st.lists(st.integers(1, 40), max_size=30).map(lambda lens: np.array(lens, dtype=np.int64))


@given(st.sampled_from(sorted(PLANNERS)), lengths, st.integers(1, 25), st.booleans())
def test_every_document_is_in_rows_dropped_or_left_for_later_token_by_token(mode, lens, row_len, is_last):
    layout = PLANNERS[mode](lens, row_len, is_last)
    pieces = layout.pieces

    assert layout.per_row.sum() == len(pieces.docs)
    row_of = np.repeat(np.arange(layout.num_rows), layout.per_row)
    assert (np.bincount(row_of, pieces.lens, layout.num_rows) == row_len).all()
    assert (pieces.lens > 0).all()
    kept = pieces.tokens_by_doc(len(lens)) + layout.rest.tokens_by_doc(len(lens))
    assert (kept + sum(layout.drops.values(), np.zeros_like(lens)) == lens).all()
    used = {
        (doc, place)
        for part in (pieces, layout.rest)
        for doc, start, size in zip(part.docs.tolist(), part.starts.tolist(), part.lens.tolist(), strict=True)
        for place in range(start, start + size)
        if doc != PADDING
    }
    assert len(used) == kept.sum(), "two pieces overlap"
    if is_last:
        assert not len(layout.rest.docs)


@given(lengths, st.integers(1, 25))
def test_tokens_that_wait_for_more_documents_are_less_than_a_row(lens, row_len):
    for planner in PLANNERS.values():
        assert planner(lens, row_len, False).rest.lens.sum() < row_len + (planner is PLANNERS["best_fit"])


def plain_best_fit(lens: list[int], row_len: int) -> list[int]:
    """Best-fit decreasing as the textbook has it; returns the free space of each row, sorted."""
    rooms: list[int] = []
    for size in sorted(lens, reverse=True):
        fitting = [place for place, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda place: rooms[place])] -= size
        else:
            rooms.append(row_len - size)
    return sorted(rooms)


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 100))
def test_best_fit_is_the_textbooks(lens, row_len):
    rows, num_rows = best_fit(np.array(lens, dtype=np.int64), row_len)
    filled = np.bincount(rows, lens, num_rows) if lens else np.zeros(0)
    assert sorted((row_len - filled).tolist()) == plain_best_fit(lens, row_len)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_needs_hardly_more_rows_than_any_packing_could(seed):
    lens = np.random.default_rng(seed).integers(1, 10, size=6)
    fewest = min(_first_fit_rows(order, 12) for order in permutations(lens.tolist()))
    assert best_fit(lens, 12)[1] <= 11 / 9 * fewest + 6 / 9


def _first_fit_rows(lens: tuple[int, ...], row_len: int) -> int:
    """Over all orders, first-fit meets the fewest rows possible."""
    rooms: list[int] = []
    for size in lens:
        place = next((place for place, room in enumerate(rooms) if room >= size), len(rooms))
        rooms += [row_len] * (place == len(rooms))
        rooms[place] -= size
    return len(rooms)
