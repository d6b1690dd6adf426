"""Tokens: documents use ids from 1000 up, EOS is 1, labels use ids from 500 to 999, knots are 10 to 18."""

import copy
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.data.config import RowsConfig, TangleConfig
from unspool.data.labels import IGNORE, labels
from unspool.data.pack import Doc, Tally
from unspool.data.tangle import KNOTS, Tangled, Tangler, draw_labels, knot_ids, tangle_row, untangle
from unspool.data.tokens import build_encoder

EOS = 1
IDS = {name: 10 + number for number, name in enumerate(KNOTS)}
D, D_END, S, S_NEXT, S_END, H1, T1, H2, T2 = IDS.values()


def documents(lens: list[int]) -> list[np.ndarray]:
    starts = 1000 + np.cumsum([0, *lens])
    docs = [np.arange(start, start + size, dtype=np.uint32) for start, size in zip(starts, lens, strict=False)]
    for doc in docs:
        doc[-1] = EOS
    return docs


def fake_labels() -> Iterator[np.ndarray]:
    """Labels of two to four tokens, no two alike."""
    number = 0
    while True:
        digits = [500 + number % 100, 600 + number // 100 % 100, 700 + number % 7, 800 + number % 9]
        yield np.array(digits[: 2 + number % 3], dtype=np.uint32)
        number += 1


def tangled(lens: list[int], row_len: int, seed: int = 0, **settings) -> tuple[list[np.ndarray], Tangled]:
    docs = documents(lens)
    config = TangleConfig(**{"min_split": 8, **settings})
    return docs, tangle_row(docs, row_len, config, IDS, fake_labels(), np.random.default_rng(seed))


def slow_mask(tokens: list[int]) -> list[bool]:
    """The rules of the method, token by token: may token i be asked for, given token i - 1?"""
    knots = {H1, T1, H2, T2}
    mask, in_label = [False], tokens[0] == D
    for given_token, target in pairwise(tokens):
        trained = not (
            given_token in knots
            or target in knots
            or in_label  # the input lies between <D> and </D>, both included
            or target in (D, S)
            or given_token in (S_END, EOS)
        )
        mask.append(trained)
        in_label = target == D or (in_label and given_token != D_END)
    return mask


def slow_solutions(tokens: list[int]) -> list[list[tuple[int, ...]]]:
    """The label lists between <S> and </S>."""
    solutions = []
    for start in [place for place, token in enumerate(tokens) if token == S]:
        inside = tokens[start + 1 : tokens.index(S_END, start)]
        parts: list[list[int]] = [[]]
        for token in inside:
            if token == S_NEXT:
                parts.append([])
            else:
                parts[-1].append(token)
        solutions.append([tuple(part) for part in parts])
    return solutions


rows = st.fixed_dictionaries(
    {
        "lens": st.lists(st.integers(1, 90), min_size=30, max_size=40).map(lambda lens: [*lens, 400]),
        "row_len": st.integers(40, 400),
        "seed": st.integers(0, 10**6),
        "probability": st.sampled_from([0.0, 0.5, 1.0]),
        "hops": st.sampled_from([{2: 1.0}, {3: 1.0}, {2: 0.5, 3: 0.5}]),
        "min_split": st.sampled_from([1, 8, 30]),
        "preserve_order": st.booleans(),
        "backtrace": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows)
def test_untangling_gives_the_documents_back_and_the_tokens_add_up(arguments):
    docs, row = tangled(**arguments)
    back = untangle(row)

    assert len(row.tokens) == arguments["row_len"] == row.doc_lens.sum()
    assert sum(map(len, back)) == row.text_tokens
    for doc, got in zip(docs[: len(back) - 1], back, strict=False):
        assert np.array_equal(got, doc)
    assert np.array_equal(back[-1], docs[len(back) - 1][: len(back[-1])])
    assert len(row.pieces) == len(row.doc_lens)
    assert [piece.start for piece in row.pieces] == [0, *np.cumsum(row.doc_lens)[:-1]]


@settings(max_examples=60, deadline=None)
@given(rows)
def test_the_loss_mask_follows_the_rules_token_by_token(arguments):
    _, row = tangled(**arguments)
    assert row.loss_mask.tolist() == slow_mask(row.tokens.tolist())


@settings(max_examples=60, deadline=None)
@given(rows)
def test_labels_never_cross_from_one_piece_into_the_next(arguments):
    _, row = tangled(**arguments)
    made = labels(row.tokens, row.doc_lens, row.loss_mask)
    as_one = labels(row.tokens, np.array([len(row.tokens)]), row.loss_mask)
    assert np.array_equal(made, as_one), "the mask alone must keep pieces apart, since the row is one sequence"
    assert (made[np.cumsum(row.doc_lens) - 1] == IGNORE).all()


@settings(max_examples=60, deadline=None)
@given(rows)
def test_each_solution_names_the_labels_of_one_document_in_order_after_its_last_piece(arguments):
    docs, row = tangled(**arguments)
    tokens = row.tokens.tolist()
    by_doc: dict[int, dict[int, tuple[int, ...]]] = {}
    last_piece: dict[int, int] = {}
    for place, piece in enumerate(row.pieces):
        if tokens[piece.start] == D:
            close = tokens.index(D_END, piece.start)
            by_doc.setdefault(piece.doc, {})[piece.part] = tuple(tokens[piece.start + 1 : close])
            last_piece[piece.doc] = place
    expected = [
        [by_doc[doc][part] for part in range(len(by_doc[doc]))]
        for doc in sorted(by_doc, key=lambda doc: last_piece[doc])
    ]
    assert slow_solutions(tokens) == expected
    ends = np.cumsum(row.doc_lens) - 1
    assert [int(ends[place]) for place in sorted(last_piece.values())] == [
        place for place, token in enumerate(tokens) if token == S_END
    ], "a solution must stand at the end of its document's last piece"

    whole = {doc for doc, got in enumerate(untangle(row)) if len(got) == len(docs[doc])}
    assert set(by_doc) <= whole, "a cut document was promised a solution"
    split = {piece.doc for piece in row.pieces if piece.part > 0}
    assert split & whole == set(by_doc) if arguments["backtrace"] else not by_doc


@settings(max_examples=60, deadline=None)
@given(rows)
def test_knots_mark_exactly_the_cuts(arguments):
    _, row = tangled(**arguments)
    parts = {doc: max(piece.part for piece in row.pieces if piece.doc == doc) for doc in {p.doc for p in row.pieces}}
    for piece in row.pieces:
        before, after = piece.text_start - 1, piece.text_start + piece.text_len
        if piece.part > 0:
            assert row.tokens[before] == (H1, H2)[piece.part - 1]
        else:
            assert piece.text_start == piece.start or row.tokens[before] == D_END
        if piece.part < parts[piece.doc]:
            assert row.tokens[after] == (T1, T2)[piece.part]
        if arguments["preserve_order"]:
            earlier = [other.part for other in row.pieces if other.doc == piece.doc and other.start < piece.start]
            assert earlier == list(range(piece.part))


def test_one_row_written_out_by_hand():
    _, row = tangled([10, 4, 12], 40, seed=15, probability=1.0, hops={2: 1.0})
    # fmt: off
    assert row.tokens.tolist() == [
        D, 500, 600, D_END, 1000, 1001, 1002, 1003, T1,
        1010, 1011, 1012, EOS,
        D, 501, 600, 701, D_END, H1, 1004, 1005, 1006, 1007, 1008, EOS, S, 500, 600, S_NEXT, 501, 600, 701, S_END,
        1014, 1015, 1016, 1017, 1018, 1019, 1020,
    ]
    assert row.loss_mask.astype(int).tolist() == [
        0, 0, 0, 0, 0, 1, 1, 1, 0,
        0, 1, 1, 1,
        0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1,
        0, 1, 1, 1, 1, 1, 1,
    ]
    # fmt: on
    assert row.doc_lens.tolist() == [9, 4, 20, 7]
    assert row.text_tokens == 10 + 4 + 7


def test_the_last_document_gets_the_right_solution_when_it_just_fits():
    # The case that the public code gets wrong: the last document of the row is split and whole.
    num_labels, num_knots, num_brackets = 2 * (2 + 3 + 4), 4, 3 * 2 + 4
    for seed in range(20):
        _, row = tangled(
            [40, 400], 40 + num_labels + num_knots + num_brackets, seed=seed, probability=1.0, hops={3: 1.0}
        )
        assert row.text_tokens == 40
        assert slow_solutions(row.tokens.tolist()) == [[(500, 600), (501, 600, 701), (502, 600, 702, 802)]]
        assert row.tokens[-1] == S_END


def test_a_cut_document_may_be_split_but_stays_at_the_rows_end_without_labels():
    seen = 0
    for seed in range(30):
        docs, row = tangled([20, 500], 200, seed=seed, probability=1.0)
        cut = [piece for piece in row.pieces if piece.doc == 1]
        seen += len(cut) > 1
        assert row.pieces[-1].doc == 1
        assert row.tokens.tolist().count(D) == len(row.pieces) - len(cut)
        assert np.array_equal(untangle(row)[1], docs[1][: sum(piece.text_len for piece in cut)])
    assert seen, "no cut document was split"


def test_split_points_and_hops_are_spread_as_configured():
    parts, points = [], []
    for seed in range(300):
        _, row = tangled([50] * 12, 400, seed=seed, probability=0.8, hops={2: 0.25, 3: 0.75}, backtrace=False)
        for doc in range(6):
            pieces = [piece for piece in row.pieces if piece.doc == doc]
            parts.append(len(pieces))
            points += [piece.text_len for piece in pieces if piece.part == 0 and len(pieces) == 2]
    shares = np.bincount(parts, minlength=4)[1:] / len(parts)
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.04)
    assert min(points) == 1
    assert max(points) == 49
    assert np.mean(points) == pytest.approx(25, abs=2.5)


def test_order_is_shuffled_over_the_row():
    _, row = tangled([50] * 12, 400, seed=3, probability=1.0, backtrace=False)
    assert [piece.doc for piece in row.pieces] != sorted(piece.doc for piece in row.pieces)


def packing(row_len: int, *, keep_rest: bool, **settings) -> tuple[Tangler, Tally]:
    config = TangleConfig(**{"min_split": 8, **settings})
    return Tangler(config, IDS, fake_labels(), np.random.default_rng(0), keep_rest), Tally()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 200), max_size=30), st.booleans(), st.integers(1, 4))
def test_a_stream_of_tangled_rows_accounts_for_every_token(lens, keep_rest, limit):
    tangler, tally = packing(96, keep_rest=keep_rest)
    drawn = 0

    def counted():
        nonlocal drawn
        for doc in documents(lens):
            drawn += len(doc)
            yield Doc(doc, "s")

    stream = tangler.pack(counted(), 96, tally)
    made = [row for _, row in zip(range(limit), stream, strict=False)]
    stream.close()

    assert drawn + tally.added == 96 * len(made) + tally.dropped.total()
    assert all((row.attention, row.source) == ("full", "s") for row in made)
    assert keep_rest <= (not tally.dropped["cut"])


def test_the_rest_of_a_cut_document_opens_the_next_row():
    tangler, tally = packing(64, keep_rest=True, probability=0.0)
    first, second, *_ = tangler.pack([Doc(doc, "s") for doc in documents([100, 100])], 64, tally)
    assert first.tokens.tolist() == list(range(1000, 1064))
    assert second.doc_lens.tolist() in ([36, 28], [28, 36])
    assert 1064 in second.tokens


def test_documents_that_do_not_end_in_eos_are_kept_apart_all_the_same():
    docs = [np.arange(start, start + 16, dtype=np.uint32) for start in range(1000, 1064, 16)]
    row = tangle_row(docs, 64, TangleConfig(probability=0.0), IDS, fake_labels(), np.random.default_rng(0))
    made = labels(row.tokens, np.array([64]), row.loss_mask)
    assert (made[15::16] == IGNORE).all()
    assert (made != IGNORE).sum() == 60


def test_knots_are_added_once_in_a_fixed_order_and_found_again(tokenizer):
    size = len(tokenizer)
    ids = knot_ids(tokenizer)
    assert list(ids.values()) == list(range(size, size + 9))
    assert knot_ids(tokenizer) == ids
    assert len(tokenizer) == size + 9
    assert tokenizer.convert_ids_to_tokens(list(ids.values())) == list(KNOTS)


def test_a_document_that_spells_a_knot_does_not_become_one(tokenizer):
    ids = knot_ids(tokenizer)
    tokens = build_encoder(tokenizer).encode(["a <|knot:D|> b"])[0].tolist()
    assert ids["<|knot:D|>"] not in tokens


def test_labels_are_six_alphanumerics_and_follow_the_seed(tokenizer):
    encoder = build_encoder(copy.deepcopy(tokenizer))

    def drawn(seed: int) -> list[str]:
        stream = draw_labels(encoder, np.random.default_rng(seed))
        return [tokenizer.decode(next(stream)) for _ in range(1500)]

    texts = drawn(0)
    assert all(len(text) == 6 and text.isalnum() and text.isascii() for text in texts)
    assert len(set(texts)) == 1500
    assert texts == drawn(0)
    assert texts != drawn(1)


def test_tangling_whole_rows_is_refused():
    with pytest.raises(ValueError, match="pack: whole puts one document in a row"):
        RowsConfig.model_validate({"from": "a", "length": "4K", "pack": "whole", "tangle": {}})
