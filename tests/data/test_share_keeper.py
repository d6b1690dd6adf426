"""Which source gives the next document, from lengths and finished rows alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unspool.data.packing.row import Row, trained_by_source
from unspool.data.packing.shares import ShareKeeper, SourceShare


def test_trained_tokens_are_counted_by_source_without_first_masked_and_added_ones():
    row = Row(
        tokens=np.arange(10, dtype=np.uint32),
        doc_lens=np.array([4, 3, 3], dtype=np.int32),
        loss_mask=np.array([1, 1, 0, 1, 1, 1, 1, 1, 1, 1], dtype=bool),
        source="a+b",
        attention="full",
        sources=["a", "b", "a"],
        added=np.array([0, 0, 0, 0, 0, 0, 1, 0, 0, 0], dtype=bool),
    )
    assert trained_by_source(row) == {"a": 4, "b": 1}


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=5, max_size=60), min_size=2, max_size=4),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_before_any_row_is_finished_the_draw_follows_the_shares_to_within_a_document(lens, weights):
    goals = np.array(weights[: len(lens)]) / sum(weights[: len(lens)])
    named = zip("abcd", goals.tolist(), lens, strict=False)
    keeper = ShareKeeper([SourceShare(name, goal, 1.0, sum(each)) for name, goal, each in named], 64, most_rows=None)
    left = [iter(each) for each in lens]
    taken = np.zeros(len(lens))
    while (length := next(left[source := keeper.next_source() or 0], None)) is not None:
        taken[source] += keeper.take(source, length)
        # The source furthest behind is next, so no source is ahead by more than its last document.
        assert (taken - goals * taken.sum() <= max(map(max, lens)) + 1e-6).all()
    assert any(next(each, None) is None for each in left)


def test_documents_that_bring_no_tokens_do_not_stall_the_others():
    keeper = ShareKeeper([SourceShare("a", 0.5, 1.0, 8), SourceShare("b", 0.5, 1.0, 8)], 4, most_rows=None, unit=4)
    left = [iter([3, 2, 8]), iter([4, 4])]
    order = []
    while (length := next(left[source := keeper.next_source() or 0], None)) is not None:
        keeper.take(source, length)
        order.append(source)
    assert order == [0, 0, 0, 1, 1]
