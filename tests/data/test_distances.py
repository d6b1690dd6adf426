"""Distances within documents: the closed form equals counting pair by pair."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.data import distances
from unspool.data.distances import count_pairs, join_rows, stretches_of
from unspool.data.packing.row import Row

EDGES = [1, 2, 4, 8, 16, 32, 64, 128]


def by_hand(row: Row, is_text: np.ndarray | None, edges: list[int]) -> list[int]:
    """Count all pairs of tokens one by one."""
    piece = np.repeat(np.arange(len(row.doc_lens)), row.doc_lens)
    doc = piece if row.chunk_ids is None else row.chunk_ids[piece]
    position = np.arange(len(row.tokens)) if row.positions is None else row.positions
    counts = [0] * len(edges)
    for one, other in combinations(range(len(row.tokens)), 2):
        if is_text is not None and not (is_text[one] and is_text[other]):
            continue
        if doc[one] != doc[other] or (row.attention == "intra_document" and piece[one] != piece[other]):
            continue
        distance = abs(int(position[other]) - int(position[one]))
        for place, (low, high) in enumerate(pairwise([*edges, 1 << 60])):
            counts[place] += low <= distance < high
    return counts


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, np.ndarray | None]:
    lens = draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    length = sum(lens)
    docs = draw(st.none() | st.lists(st.integers(0, 3), min_size=len(lens), max_size=len(lens)))
    skips = draw(st.none() | st.lists(st.sampled_from([1, 1, 1, 1, 2, 40]), min_size=length, max_size=length))
    texts = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
    row = Row(
        tokens=np.zeros(length, dtype=np.uint32),
        doc_lens=np.array(lens, dtype=np.int32),
        loss_mask=None,
        source="books",
        attention=draw(st.sampled_from(["full", "intra_document"])),
        chunk_ids=None if docs is None else np.array(docs, dtype=np.int32),
        positions=None if skips is None else np.cumsum(skips).astype(np.int32),
    )
    return row, None if texts is None else np.array(texts, dtype=np.bool_)


@settings(max_examples=300, deadline=None)
@given(rows(), st.lists(st.integers(1, 90), min_size=1, max_size=5, unique=True).map(sorted))
def test_counts_are_those_of_all_pairs_of_tokens(case, edges):
    row, is_text = case
    assert count_pairs(stretches_of(row, is_text), edges).tolist() == by_hand(row, is_text, edges)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4), st.sampled_from([1, 2, 5, 1 << 17]))
def test_rows_add_up_and_never_mix_however_many_are_counted_at_once(cases, at_once):
    apart = [count_pairs(stretches_of(*case), EDGES) for case in cases]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distances, "_AT_ONCE", at_once)
        together = count_pairs(join_rows([stretches_of(*case) for case in cases]), EDGES)
    assert together.tolist() == np.sum(apart, axis=0).tolist()


def test_one_document_of_a_whole_row_has_a_quarter_of_its_pairs_beyond_half():
    length = 1 << 20
    row = Row(np.zeros(length, np.uint32), np.array([length], np.int32), None, "books", "full")
    near, far = count_pairs(stretches_of(row), [1, length // 2]).tolist()
    assert near + far == length * (length - 1) // 2
    assert far == (length // 2) * (length // 2 + 1) // 2


def test_without_text_there_is_nothing():
    row = Row(np.zeros(4, np.uint32), np.array([4], np.int32), None, "books", "full")
    assert count_pairs(stretches_of(row, np.zeros(4, np.bool_)), EDGES).sum() == 0
