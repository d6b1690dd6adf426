from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.data.pack import PACKERS, Doc, Tally, interleave


def documents(lens: list[int]) -> list[Doc]:
    """Documents whose tokens are all different, so that any mix-up shows."""
    starts = np.cumsum([0, *lens])
    return [
        Doc(np.arange(start, start + size, dtype=np.uint32), "ab"[number % 2])
        for number, (start, size) in enumerate(zip(starts, lens, strict=False))
    ]


def packed(mode: str, lens: list[int], row_len: int) -> tuple[list[list[int]], list[list[int]], Counter[str]]:
    tally = Tally()
    rows = list(PACKERS[mode](documents(lens), row_len, tally))
    return [row.tokens.tolist() for row in rows], [row.doc_lens.tolist() for row in rows], +tally.dropped


def test_concat_continues_a_cut_document_in_the_next_row():
    rows, lens, dropped = packed("concat", [3, 4, 2, 1], row_len=4)
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lens == [[3, 1], [3, 1]]
    assert dropped == {"last_row": 2}


def test_intact_discards_the_rest_of_a_cut_document():
    rows, lens, dropped = packed("intact", [3, 4, 2, 1, 1], row_len=4)
    assert rows == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert lens == [[3, 1], [2, 1, 1]]
    assert dropped == {"cut": 3}


def test_whole_cuts_rows_only_from_documents_that_fill_them():
    rows, lens, dropped = packed("whole", [3, 9, 4], row_len=4)
    assert rows == [[3, 4, 5, 6], [7, 8, 9, 10], [12, 13, 14, 15]]
    assert lens == [[4], [4], [4]]
    assert dropped == {"short": 3, "tail": 1}


def test_a_row_names_the_sources_it_holds():
    rows = PACKERS["concat"](documents([4, 2, 2]), 4, Tally())
    assert [row.source for row in rows] == ["a", "b+a"]


lengths = st.lists(st.integers(1, 40), max_size=30)


@given(st.sampled_from(sorted(PACKERS)), lengths, st.integers(1, 20), st.none() | st.integers(0, 5))
def test_every_token_is_in_a_row_or_counted_as_dropped(mode, lens, row_len, limit):
    drawn = Counter()

    def counted():
        for doc in documents(lens):
            drawn["tokens"] += len(doc.tokens)
            yield doc

    tally = Tally()
    stream = PACKERS[mode](counted(), row_len, tally)
    rows = list(islice(stream, limit))
    stream.close()

    assert all(len(row.tokens) == row_len == row.doc_lens.sum() for row in rows)
    assert all((row.doc_lens > 0).all() for row in rows)
    assert drawn["tokens"] == len(rows) * row_len + tally.dropped.total()
    assert tally.added == 0
    in_rows = np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0)
    assert len(np.unique(in_rows)) == len(in_rows), "a token was used twice"


@given(lengths, st.integers(1, 20))
def test_concat_keeps_the_whole_stream_in_order_and_marks_every_boundary(lens, row_len):
    rows, row_lens, dropped = packed("concat", lens, row_len)
    assert list(chain(*rows)) == list(range(len(rows) * row_len))
    assert dropped.total() == sum(lens) % row_len
    ends = np.cumsum(list(chain(*row_lens)))
    boundaries = {int(end) for end in np.cumsum(lens)} | set(range(row_len, sum(lens) + 1, row_len))
    assert set(ends.tolist()) == {end for end in boundaries if end <= len(rows) * row_len}


@given(lengths, st.integers(1, 20))
def test_intact_and_whole_never_continue_a_document_elsewhere(lens, row_len):
    starts = {int(start) for start in np.cumsum([0, *lens])}
    for row, doc_lens in zip(*packed("intact", lens, row_len)[:2], strict=True):
        begins = np.cumsum([0, *doc_lens[:-1]])
        assert {row[begin] for begin in begins} <= starts
    ends = {int(end) for end in np.cumsum(lens)}
    for row in packed("whole", lens, row_len)[0]:
        assert row == list(range(row[0], row[0] + row_len))
        assert not ends & set(row[1:]), "a row holds two documents"


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=5, max_size=60), min_size=1, max_size=4),
    st.lists(st.floats(0.05, 1), min_size=4, max_size=4),
)
def test_interleaving_follows_the_shares_to_within_a_document_at_every_moment(lens, weights):
    useful = [np.array(each) for each in lens]
    shares = np.array(weights[: len(lens)]) / sum(weights[: len(lens)])
    longest = max(map(max, lens))
    taken = np.zeros(len(lens))
    used = [0] * len(lens)
    for source in interleave(useful, shares.tolist()):
        taken[source] += useful[source][used[source]]
        used[source] += 1
        # The one furthest behind goes next, so nobody is ahead by more than its last document.
        assert (taken - shares * taken.sum() <= longest + 1e-6).all()
    assert any(count == len(each) for count, each in zip(used, lens, strict=True))


def test_interleaving_ends_when_the_source_whose_turn_it_is_has_no_more():
    order = list(interleave([np.full(100, 10), np.full(3, 10)], [0.5, 0.5]))
    assert order == [0, 1, 0, 1, 0, 1, 0]


def test_documents_that_bring_no_tokens_do_not_stall_the_others():
    order = list(interleave([np.array([0, 0, 8]), np.array([4, 4])], [0.5, 0.5]))
    assert order == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("mode", sorted(PACKERS))
def test_no_documents_give_no_rows(mode):
    assert packed(mode, [], 8) == ([], [], {})
