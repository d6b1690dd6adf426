from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.data.packing.pack import PACKERS, Doc, Tally
from unspool.data.packing.row import Row
from unspool.data.strategies.base import PackingInputs
from unspool.data.strategies.cip import CIP


def plain_row(doc_lens: list[int]) -> Row:
    """Token 100·d + i is the i-th of document d."""
    tokens = np.concatenate([100 * doc + np.arange(size, dtype=np.uint32) for doc, size in enumerate(doc_lens)])
    return Row(tokens.astype(np.uint32), np.array(doc_lens, dtype=np.int32), None, "a", "intra_document")


def finisher(**settings):
    """What a dataset with `cip` does to its packed rows."""
    inputs = PackingInputs(readers={}, tokenizer=None, pad=0, seed=5, name="rows")
    return CIP(**settings).finish(None, inputs)  # type: ignore[arg-type]


def interleave_row(row: Row, pieces: int, split: str = "equal") -> Row:
    (made,) = finisher(pieces=pieces, split=split)([row])
    return made


def make_docs(lens: list[int]) -> list[Doc]:
    """All tokens different: 0, 1, 2, …"""
    ends = np.cumsum([0, *lens])
    return [Doc(np.arange(ends[i], ends[i + 1], dtype=np.uint32), "ab"[i % 2]) for i in range(len(lens))]


def test_a_row_has_all_first_pieces_then_all_second_ones():
    """The fast variant of the public code returns plain document order."""
    row = interleave_row(plain_row([4, 6, 2]), 2)

    assert row.tokens.tolist() == [0, 1, 100, 101, 102, 200, 2, 3, 103, 104, 105, 201]
    assert row.doc_lens.tolist() == [2, 3, 1, 2, 3, 1]
    assert row.chunk_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert (row.attention, row.source, row.loss_mask) == ("full", "a", None)


def test_pieces_are_equal_to_within_a_token_and_short_documents_stay_whole_in_front():
    row = interleave_row(plain_row([7, 2, 3]), 3)

    assert row.chunk_ids.tolist() == [0, 1, 2, 0, 2, 0, 2]
    assert row.doc_lens.tolist() == [2, 2, 1, 2, 1, 3, 1]
    assert row.tokens.tolist() == [0, 1, 100, 101, 200, 2, 3, 201, 4, 5, 6, 202]


def test_one_document_alone_stays_as_it_is():
    row = interleave_row(plain_row([9]), 4)
    assert row.tokens.tolist() == list(range(9))


def test_by_default_documents_are_split_at_random_points():
    """The CIP-2 baseline of Untie the Knots: "each document was randomly split into two chunks"."""
    row = finisher()([plain_row([101] * 4000)])[0]

    points = row.doc_lens[:4000]
    assert row.chunk_ids.tolist() == [*range(4000), *range(4000)]
    assert (points + row.doc_lens[4000:]).tolist() == [101] * 4000
    counts = np.bincount(points, minlength=102)
    assert counts[0] == 0 and counts[101] == 0, "no chunk is empty"
    # 40 are expected of each of the 100 points; a chi-squared test with 99 degrees of freedom.
    assert ((counts[1:101] - 40) ** 2 / 40).sum() < 150


def test_three_random_pieces_have_two_different_points_each_as_likely():
    row = finisher(pieces=3)([plain_row([5] * 6000)])[0]

    firsts, seconds = row.doc_lens[:6000], row.doc_lens[6000:12000]
    pairs = np.unique(np.stack([firsts, firsts + seconds]), axis=1, return_counts=True)
    assert pairs[0].T.tolist() == [[1, 2], [1, 3], [1, 4], [2, 3], [2, 4], [3, 4]]
    assert np.abs(pairs[1] - 1000).max() < 130


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 9), st.sampled_from(["random", "equal"]))
@settings(max_examples=300, deadline=None)
def test_a_row_keeps_its_tokens_and_the_order_inside_documents(doc_lens, pieces, split):
    row = interleave_row(plain_row(doc_lens), pieces, split)

    assert row.doc_lens.sum() == len(row.tokens) == sum(doc_lens)
    owners = np.repeat(row.chunk_ids, row.doc_lens)
    for doc, size in enumerate(doc_lens):
        assert row.tokens[owners == doc].tolist() == list(range(100 * doc, 100 * doc + size))
        mine = row.doc_lens[row.chunk_ids == doc]
        assert len(mine) == (pieces if size >= pieces else 1)
        assert split == "random" or mine.max() - mine.min() <= 1
    # Round after round through the documents: a number that falls begins a new round.
    assert (np.diff(row.chunk_ids) <= 0).sum() <= pieces - 1


@given(
    st.lists(st.integers(1, 50), max_size=40),
    st.integers(4, 40),
    st.integers(2, 5),
    st.sampled_from(["concat", "truncate"]),
    st.integers(0, 12),
)
@settings(max_examples=300, deadline=None)
def test_rows_have_the_requested_length_and_no_token_is_lost(lens, row_len, pieces, mode, stop):
    tally = Tally()
    stream = PACKERS[mode](make_docs(lens), row_len, tally)
    packed = list(islice(stream, stop))
    stream.close()
    rows = finisher(pieces=pieces)(packed) if packed else []

    assert len(rows) == len(packed)
    assert all(len(row.tokens) == row_len == row.doc_lens.sum() for row in rows)
    assert all(len(row.chunk_ids) == len(row.doc_lens) for row in rows)
    assert tally.added == 0
    # A generator that never began has drawn nothing.
    drawn = sum(lens) if stop else 0
    assert drawn == sum(len(row.tokens) for row in rows) + tally.dropped.total()
    tokens = np.concatenate([np.zeros(0, dtype=np.uint32), *(row.tokens for row in rows)])
    assert len(np.unique(tokens)) == len(tokens)


@pytest.mark.parametrize(("mode", "begins"), [("concat", 10), ("truncate", 15)])
def test_the_rest_of_a_cut_document_starts_the_next_row_or_is_dropped(mode, begins):
    tally = Tally()
    packed = list(PACKERS[mode](make_docs([6, 9, 20]), 10, tally))
    first, second = finisher(split="equal")(packed)[:2]

    assert first.tokens.tolist() == [0, 1, 2, 6, 7, 3, 4, 5, 8, 9]
    assert second.tokens[0] == begins
    assert tally.dropped["cut"] == (0 if mode == "concat" else 5 + 10)


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=8), min_size=1, max_size=6),
    st.integers(2, 5),
    st.sampled_from(["random", "equal"]),
)
@settings(max_examples=200, deadline=None)
def test_several_rows_at_once_give_the_same_as_one_row_at_a_time(rows, pieces, split):
    plain = [plain_row(doc_lens) for doc_lens in rows]
    together, one_by_one = finisher(pieces=pieces, split=split)(plain), finisher(pieces=pieces, split=split)
    for made, row in zip(together, plain, strict=True):
        (alone,) = one_by_one([row])
        assert made.tokens.tolist() == alone.tokens.tolist()
        assert made.doc_lens.tolist() == alone.doc_lens.tolist()
        assert made.chunk_ids.tolist() == alone.chunk_ids.tolist()
