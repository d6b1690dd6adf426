from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.data.packing import pack
from unspool.data.packing.pack import PACKERS, Doc, Tally
from unspool.data.packing.row import IGNORE, labels

PAD = 2**31


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
    rows, lens, dropped = packed("truncate", [3, 4, 2, 1, 1], row_len=4)
    assert rows == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert lens == [[3, 1], [2, 1, 1]]
    assert dropped == {"cut": 3}


def test_whole_cuts_rows_only_from_documents_that_fill_them():
    rows, lens, dropped = packed("single_doc", [3, 9, 4], row_len=4)
    assert rows == [[3, 4, 5, 6], [7, 8, 9, 10], [12, 13, 14, 15]]
    assert lens == [[4], [4], [4]]
    assert dropped == {"short": 3, "tail": 1}


def test_a_row_names_the_sources_it_holds():
    rows = PACKERS["concat"](documents([4, 2, 2]), 4, Tally())
    assert [row.source for row in rows] == ["a", "b+a"]


lengths = st.lists(st.integers(1, 40), max_size=30)


@pytest.fixture(params=["one window", "many windows"])
def windows(request, monkeypatch):
    """Packing must not depend on how many documents are looked at together, except for what `fit` can choose from."""
    if request.param == "many windows":
        monkeypatch.setattr(pack, "BATCH_TOKENS", 7)
        monkeypatch.setattr(pack, "WINDOW_TOKENS", {"best_fit": 50})
        monkeypatch.setattr(pack, "WINDOW_DOCS", 5)


with_windows = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@with_windows
@given(st.sampled_from(sorted(PACKERS)), lengths, st.integers(1, 20), st.none() | st.integers(0, 5))
def test_every_token_is_in_a_row_or_counted_as_dropped(windows, mode, lens, row_len, limit):
    drawn: Counter[str] = Counter()
    drawn_docs = 0

    def counted():
        nonlocal drawn_docs
        for doc in documents(lens):
            drawn[doc.source] += len(doc.tokens)
            drawn_docs += 1
            yield doc

    tally = Tally()
    stream = PACKERS[mode](counted(), row_len, tally, pad=PAD)
    rows = list(islice(stream, limit))
    stream.close()

    assert all(len(row.tokens) == row_len == row.doc_lens.sum() for row in rows)
    assert all((row.doc_lens > 0).all() for row in rows)
    assert drawn.total() + tally.added == len(rows) * row_len + tally.dropped.total()
    in_rows = np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0)
    texts = in_rows[in_rows != PAD]
    assert len(np.unique(texts)) == len(texts), "a token was used twice"
    assert tally.added == tally.padding == len(in_rows) - len(texts)
    assert mode == "best_fit" or not tally.padding
    # The same by source, and as many documents as there are first tokens in rows.
    firsts = {int(doc.tokens[0]): doc for doc in documents(lens)}
    for name, entry in tally.sources.items():
        assert drawn[name] == entry.lengths.num_tokens + entry.dropped.total()
        assert entry.documents == sum(firsts[token].source == name for token in texts.tolist() if token in firsts)
    assert tally.dropped == sum((entry.dropped for entry in tally.sources.values()), Counter())
    assert 0 <= tally.given_back <= drawn_docs
    assert bool(tally.given_back) <= (limit is not None)


@with_windows
@given(st.sampled_from(["concat", "truncate", "single_doc"]), lengths, st.integers(1, 20))
def test_rows_and_drops_are_the_same_in_windows_of_any_size(windows, mode, lens, row_len):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "BATCH_TOKENS", 1)
        patch.setattr(pack, "WINDOW_DOCS", 1)
        one_by_one = packed(mode, lens, row_len)
    assert packed(mode, lens, row_len) == one_by_one


@with_windows
@given(st.sampled_from(sorted(PACKERS)), lengths, st.integers(1, 20))
def test_truncated_are_the_documents_that_begin_in_a_row_and_do_not_end_in_it(windows, mode, lens, row_len):
    tally = Tally()
    rows = list(PACKERS[mode](documents(lens), row_len, tally, pad=PAD))
    ends = {int(doc.tokens[0]): int(doc.tokens[-1]) for doc in documents(lens)}
    cut = sum(int(ends[token]) not in row.tokens for row in rows for token in row.tokens.tolist() if token in ends)
    assert sum(entry.truncated for entry in tally.sources.values()) == cut


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
    for row, doc_lens in zip(*packed("truncate", lens, row_len)[:2], strict=True):
        begins = np.cumsum([0, *doc_lens[:-1]])
        assert {row[begin] for begin in begins} <= starts
    ends = {int(end) for end in np.cumsum(lens)}
    for row in packed("single_doc", lens, row_len)[0]:
        assert row == list(range(row[0], row[0] + row_len))
        assert not ends & set(row[1:]), "a row holds two documents"


def fitted(lens: list[int], row_len: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and document lengths of each row; padding is PAD."""
    rows = PACKERS["best_fit"](documents(lens), row_len, Tally(), pad=PAD)
    return [(row.tokens.tolist(), row.doc_lens.tolist()) for row in rows]


def test_fit_places_the_longest_first_where_least_room_is_left():
    # 7 and 3 fill a row and so do 6 and 4; in the order drawn, 3 would have gone to 6.
    assert sorted(fitted([6, 3, 4, 7], row_len=10)) == [
        ([0, 1, 2, 3, 4, 5, 9, 10, 11, 12], [6, 4]),
        ([6, 7, 8, 13, 14, 15, 16, 17, 18, 19], [3, 7]),
    ]


def test_fit_cuts_only_documents_longer_than_a_row_and_places_their_rest():
    rows = sorted(fitted([9, 2, 1], row_len=4))
    assert rows == [([0, 1, 2, 3], [4]), ([4, 5, 6, 7], [4]), ([8, 9, 10, 11], [1, 2, 1])]


def test_padding_of_best_fit_is_a_last_document_without_loss():
    tally = Tally()
    (row,) = PACKERS["best_fit"](documents([3, 2]), 8, tally, pad=PAD)
    assert row.tokens.tolist() == [0, 1, 2, 3, 4, PAD, PAD, PAD]
    assert row.doc_lens.tolist() == [3, 2, 3]
    assert row.loss_mask.tolist() == [True] * 5 + [False] * 3
    assert labels(row.tokens, row.doc_lens, row.loss_mask).tolist() == [1, 2, IGNORE, 4, *[IGNORE] * 4]
    assert row.source == "a+b"
    assert (tally.padding, tally.added) == (3, 3)
    assert sum(entry.lengths.num_documents for entry in tally.sources.values()) == 2, "padding is not a document"


@with_windows
@given(lengths, st.integers(1, 60))
def test_fit_loses_nothing_and_cuts_nothing_that_fits(windows, lens, row_len):
    rows = fitted(lens, row_len)
    texts = [token for tokens, _ in rows for token in tokens if token != PAD]
    assert sorted(texts) == list(range(sum(lens)))
    pieces = set()
    for tokens, doc_lens in rows:
        for end, size in zip(np.cumsum(doc_lens).tolist(), doc_lens, strict=True):
            pieces.add((tokens[end - size], size))
    for doc in documents(lens):
        if len(doc.tokens) <= row_len:
            assert (int(doc.tokens[0]), len(doc.tokens)) in pieces


def test_the_first_rows_of_fit_hold_documents_as_long_as_the_others():
    lens = (np.random.default_rng(0).exponential(100, size=9000).astype(int) + 1).tolist()
    means = np.array([np.mean(doc_lens) for _, doc_lens in fitted(lens, row_len=1000)])
    for count in (50, 200, 400):
        assert means[:count].mean() == pytest.approx(means.mean(), rel=0.1)
    assert means.std() > 0.3 * means.mean(), "all rows are alike, so the lines above checked nothing"


@pytest.mark.parametrize("mode", sorted(PACKERS))
def test_no_documents_give_no_rows(mode):
    assert packed(mode, [], 8) == ([], [], {})
