"""Tokens: documents use ids from 1000 up, EOS is 1, labels use ids from 500 to 999, knots are 10 to 28.

What holds for every row is in test_tangle_properties.py; here are cases made by hand, and what holds over many rows.
"""

import copy
from itertools import count, islice

import numpy as np
import pytest

from unspool.data.packing import pack
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.pack import Doc, Tally
from unspool.data.packing.row import IGNORE, Row, labels
from unspool.data.strategies.utk import UtK, tangle
from unspool.data.strategies.utk.special_tokens import ALL_KNOTS, LABEL_CHARS, LabelPool, label_drawer
from unspool.data.strategies.utk.tangle import Tangler, build_tangler, untangle
from unspool.data.tokenize.encoder import build_encoder

from .slow_tangle import slow_pieces, slow_solutions

EOS = 1
IDS = {name: 10 + number for number, name in enumerate(ALL_KNOTS)}
D, D_END, S, S_NEXT, S_END, H1, T1, H2, T2 = list(IDS.values())[:9]


def documents(lens: list[int]) -> list[np.ndarray]:
    starts = 1000 + np.cumsum([0, *lens])
    docs = [np.arange(start, start + size, dtype=np.uint32) for start, size in zip(starts, lens, strict=False)]
    for doc in docs:
        doc[-1] = EOS
    return docs


def fake_labels():
    """Labels of two to four tokens; those of one generator begin at 0, those of the next at 5,000, and so on."""
    starts, numbers = count(step=5000), {}

    def draw(wanted: int, rng: np.random.Generator) -> list[np.ndarray]:
        found = []
        for number in islice(numbers.setdefault(rng, count(next(starts) if rng not in numbers else 0)), wanted):
            digits = [500 + number % 100, 600 + number // 100 % 100, 700 + number % 7, 800 + number % 9]
            found.append(np.array(digits[: 2 + number % 3], dtype=np.uint32))
        return found

    return draw


def tangler(seed: int = 0, keep_rest: bool = True, **settings) -> Tangler:
    config = UtK(**{"min_split": 8, **settings})
    return Tangler(config, IDS, fake_labels(), np.random.default_rng(seed), keep_rest)


def tangled(lens: list[int], row_len: int, seed: int = 0, *, keep_rest: bool = True, **settings) -> list[Row]:
    docs = [Doc(doc, "s") for doc in documents(lens)]
    return list(tangler(seed, keep_rest, **settings).pack(docs, row_len, Tally()))


def pieces_of(row: Row):
    return slow_pieces(row.tokens.tolist(), row.doc_lens.tolist(), row.chunk_ids.tolist(), IDS)


def back(row: Row) -> list[list[int]]:
    return [doc.tolist() for doc in untangle(row.tokens, row.doc_lens, row.chunk_ids, IDS)]


# One row


def test_one_row_written_out_by_hand():
    row = tangled([10, 4, 12], 40, seed=2, probability=1.0, hops={2: 1.0})[0]
    # fmt: off
    assert row.tokens.tolist() == [
        D, 500, 600, D_END, 1000, 1001, 1002, 1003, T1,
        1010, 1011, 1012, EOS,
        D, 501, 600, 701, D_END, H1, 1004, 1005, 1006, 1007, 1008, EOS, S, 500, 600, S_NEXT, 501, 600, 701, S_END,
        1014, 1015, 1016, 1017, 1018, 1019, 1020,
    ]
    # No loss on labels, knots and <S>; the labels that <S> asks for, and the text after a knot or label, have one.
    paper = [
        0, 0, 0, 0, 1, 1, 1, 1, 0,
        0, 1, 1, 1,
        0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1,
        0, 1, 1, 1, 1, 1, 1,
    ]
    released = [
        0, 0, 0, 0, 0, 1, 1, 1, 0,
        0, 1, 1, 1,
        0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1,
        0, 1, 1, 1, 1, 1, 1,
    ]
    assert row.loss_mask.astype(int).tolist() == paper
    # fmt: on
    assert row.doc_lens.tolist() == [9, 4, 20, 7]
    assert row.chunk_ids.tolist() == [0, 1, 0, 2]
    other = tangled([10, 4, 12], 40, seed=2, probability=1.0, hops={2: 1.0}, mask="released")[0]
    assert other.loss_mask.astype(int).tolist() == released
    assert other.tokens.tolist() == row.tokens.tolist()


@pytest.mark.parametrize("mask", ["paper", "released"])
def test_the_masks_differ_in_one_token_for_each_piece_of_a_split_document(mask):
    """The first token of text, which the released code leaves out; both modes count it."""
    made = tangler(probability=1.0, mask=mask)
    stream = made.pack([Doc(doc, "s") for doc in documents([50] * 60)], 400, Tally())
    rows = list(islice(stream, 5))
    stream.close()
    pieces = [piece for row in rows for piece in pieces_of(row)]
    marked = sum(piece.label is not None or piece.part > 0 for piece in pieces)
    assert 0 < made.counts["masks_differ"] == marked


def test_the_last_document_gets_the_right_solution_where_the_public_code_gives_a_wrong_one():
    """There, of the last document's pieces the last is looked up by its number in the document, not in the row."""
    num_marks = 4 + 3 * 2 + 4 + 2 * (4 + 2 + 3)  # knots, brackets, solution, labels 2, 3 and 4 twice
    seen = 0
    for seed in range(40):
        row = tangled([30, 40, 400], 30 + 40 + num_marks, seed, probability=1.0, hops={3: 1.0}, min_split=35)[0]
        pieces = pieces_of(row)
        places = [place for place, piece in enumerate(pieces) if piece.doc == 1]
        assert len(places) == 3, "the last document is split and whole"
        looked_up = [*places[:2], 2]
        if looked_up == places:
            continue
        seen += 1
        wrong = [pieces[place].label for place in looked_up]
        right = [(500, 600), (501, 600, 701), (502, 600, 702, 802)]
        [(place, listed)] = slow_solutions(row.tokens.tolist(), IDS)
        assert listed == right != wrong
        assert place == pieces[places[-1]].start + int(row.doc_lens[places[-1]]) - (3 * 3 + 4)
    assert seen, "the public code would be right in all these rows"


def test_a_cut_document_may_be_split_but_stays_at_the_rows_end_without_labels():
    seen = 0
    for seed in range(30):
        row = tangled([20, 500], 200, seed, probability=1.0)[0]
        pieces = pieces_of(row)
        cut = [piece for piece in pieces if piece.doc == 1]
        seen += len(cut) > 1
        assert pieces[-1] == cut[-1] and cut[-1].part == len(cut) - 1
        assert row.tokens.tolist().count(D) == len(pieces) - len(cut)
        assert back(row)[1] == documents([20, 500])[1].tolist()[: sum(len(piece.text) for piece in cut)]
    assert seen, "no cut document was split"


def test_pieces_are_put_in_order_by_their_knots_where_the_row_does_not_keep_it():
    disordered = 0
    for seed in range(20):
        row = tangled([60, 60, 60], 150, seed, probability=1.0, preserve_order=False, hops={8: 1.0}, backtrace=False)[0]
        parts = [piece.part for piece in pieces_of(row) if piece.doc == 0]
        disordered += parts != sorted(parts)
        assert back(row)[0] == documents([60])[0].tolist()
    assert disordered > 15


def test_a_row_without_pieces_of_one_document_is_its_documents():
    docs = documents([5, 7, 3])
    got = untangle(np.concatenate(docs), np.array([5, 7, 3]), None, IDS)
    assert [doc.tolist() for doc in got] == [doc.tolist() for doc in docs]


def test_documents_that_do_not_end_in_eos_are_kept_apart_all_the_same():
    docs = [Doc(np.arange(start, start + 16, dtype=np.uint32), "s") for start in range(1000, 1064, 16)]
    [row] = tangler(probability=0.0).pack(docs, 64, Tally())
    made = labels(row.tokens, np.array([64]), row.loss_mask)
    assert (made[15::16] == IGNORE).all()
    assert (made != IGNORE).sum() == 60


def test_chunks_of_one_length_follow_the_length_of_each_document():
    """The 1K-chunk ablation of Untie the Knots, here with chunks of at most 16."""
    rows = tangled([40, 16, 200, 33] * 10, 800, probability=1.0, chunk=16, backtrace=False)
    for row in rows:
        pieces = pieces_of(row)
        for doc in range(1, max(row.chunk_ids)):  # the first and the last may be cut
            mine = [piece for piece in pieces if piece.doc == doc]
            size = sum(len(piece.text) for piece in mine)
            assert len(mine) == {40: 3, 16: 1, 200: 8, 33: 3}[size]
            assert max(len(piece.text) for piece in mine) == -(-size // len(mine))


# Many rows


def test_split_points_and_hops_are_spread_as_configured():
    rows = tangled([50] * 4000, 400, probability=0.8, hops={2: 0.25, 3: 0.75}, backtrace=False)
    parts, points = [], []
    for row in rows:
        pieces = pieces_of(row)
        for doc in range(1, max(row.chunk_ids)):  # the first and the last may be cut
            mine = [piece for piece in pieces if piece.doc == doc]
            parts.append(len(mine))
            points += [len(piece.text) for piece in mine if piece.part == 0 and len(mine) == 2]
    shares = np.bincount(parts, minlength=4)[1:] / len(parts)
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.04)
    assert min(points) == 1
    assert max(points) == 49
    assert np.mean(points) == pytest.approx(25, abs=2.5)


def test_points_are_uniform_without_replacement():
    """Three of the four places between five tokens: every choice of three is as likely."""
    rows = tangled([5] * 4000, 110, probability=1.0, hops={4: 1.0}, min_split=5, backtrace=False)
    lens = [
        [len(piece.text) for piece in pieces_of(row) if piece.doc == doc] for row in rows for doc in (3, 4, 5, 6, 7)
    ]
    found = np.array([piece_lens for piece_lens in lens if len(piece_lens) == 4])
    twos = np.sort(np.argmax(found == 2, axis=1))
    assert np.bincount(twos) / len(twos) == pytest.approx([0.25] * 4, abs=0.07)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_per_row_all_documents_of_a_row_are_split_or_none(probability):
    rows = tangled([50] * 3000, 500, probability=probability, per="row", backtrace=False)
    split = []
    for row in rows:
        whole = {piece.doc for piece in pieces_of(row) if piece.part == 0 and not piece.has_tail}
        docs = set(range(1, int(max(row.chunk_ids)) - 1))  # those that neither the row's beginning nor its end touches
        assert not docs & whole or docs <= whole
        split.append(not docs & whole)
    assert np.mean(split) == pytest.approx(probability, abs=0.08)


def test_pieces_are_shuffled_over_the_row():
    row = tangled([50] * 12, 400, seed=3, probability=1.0, backtrace=False)[0]
    assert row.chunk_ids.tolist() != sorted(row.chunk_ids.tolist())


def test_the_rest_of_a_cut_document_opens_the_next_row_or_is_dropped():
    docs, tally = [Doc(doc, "s") for doc in documents([100, 100])], Tally()
    first, second, *_ = tangler(probability=0.0).pack(docs, 64, tally)
    assert first.tokens.tolist() == list(range(1000, 1064))
    assert second.doc_lens.tolist() in ([36, 28], [28, 36])
    assert 1064 in second.tokens
    assert tally.dropped == {"last_row": 200 - 3 * 64}

    tally = Tally()
    first, second = tangler(probability=0.0, keep_rest=False).pack(docs, 64, tally)
    assert second.tokens.tolist() == list(range(1100, 1164))
    assert tally.dropped["cut"] == tally.sources["s"].dropped["cut"] == 2 * 36


@pytest.mark.parametrize("keep_rest", [True, False])
@pytest.mark.parametrize("per", ["document", "row"])
def test_rows_do_not_depend_on_how_many_documents_are_looked_at_together(keep_rest, per, monkeypatch):
    lens = np.random.default_rng(0).integers(1, 300, size=400).tolist()
    arguments = {"keep_rest": keep_rest, "per": per, "hops": {2: 0.5, 5: 0.5}, "probability": 0.6}

    def rows(batch_tokens: int) -> list[list[int]]:
        monkeypatch.setattr(pack, "BATCH_TOKENS", batch_tokens)
        return [row.tokens.tolist() for row in tangled(lens, 256, **arguments)]

    at_once = rows(1 << 20)
    assert len(at_once) > 150
    assert rows(1) == rows(1000) == at_once


def test_an_early_closed_stream_yields_the_first_rows_and_counts_documents_drawn_ahead():
    lens = [90] * 50
    whole = tangled(lens, 256, seed=7)
    docs, tally, drawn = documents(lens), Tally(), 0

    def counted():
        nonlocal drawn
        for number, doc in enumerate(docs):
            drawn += len(doc)
            yield Doc(doc, "ab"[number % 2])

    stream = tangler(7).pack(counted(), 256, tally)
    rows = list(islice(stream, 3))
    stream.close()

    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in whole[:3]]
    assert {row.source for row in rows} <= {"a+b", "b+a"}
    in_rows = sum(len(text) for row in rows for text in back(row))
    assert drawn == 50 * 90
    assert in_rows + tally.dropped.total() == drawn
    assert tally.given_back == 50 - -(-in_rows // 90)
    assert tally.dropped["unread"] == 90 * tally.given_back
    assert set(+tally.dropped) == {"limit", "unread"}


def test_the_same_seed_gives_the_same_rows_and_another_does_not(tokenizer):
    config = DatasetConfig.model_validate({"from": "a", "seq_len": 512, "utk": {"min_split": 16}})
    docs = [Doc(doc % 300 + 3, "a") for doc in documents([70] * 40)]

    def rows(seed: int) -> list[bytes]:
        made = build_tangler(config.utk, copy.deepcopy(tokenizer), np.random.default_rng(seed), keep_rest=True)
        return [row.tokens.tobytes() + row.loss_mask.tobytes() for row in made.pack(docs, 512, Tally())]

    assert rows(0) == rows(0)
    assert not set(rows(0)) & set(rows(1))


def test_tangling_brings_the_knots_that_its_hops_need(tokenizer):
    size = len(tokenizer)
    docs = [Doc(np.append(np.arange(70, dtype=np.uint32) + 3, np.uint32(tokenizer.eos_token_id)), "a")] * 40
    for hops, num_knots in ((2, 9), (3, 9), (8, 19)):
        config = DatasetConfig.model_validate(
            {"from": "a", "seq_len": 512, "utk": {"min_split": 16, "hops": {hops: 1}}}
        )
        made = build_tangler(config.utk, copy.deepcopy(tokenizer), np.random.default_rng(0), keep_rest=True)
        assert list(made.knots.values()) == list(range(size, size + num_knots))
        used = {token for row in made.pack(docs, 512, Tally()) for token in row.tokens.tolist() if token >= size}
        assert used == set(range(size, size + 5 + 2 * (hops - 1)))


# Labels


def test_labels_are_six_alphanumerics_and_follow_the_seed(tokenizer):
    draw = label_drawer(build_encoder(copy.deepcopy(tokenizer)))

    def drawn(seed: int) -> list[str]:
        return [tokenizer.decode(label) for label in draw(1500, np.random.default_rng(seed))]

    texts = drawn(0)
    assert all(len(text) == LABEL_CHARS and text.isalnum() and text.isascii() for text in texts)
    assert len(set(texts)) == 1500
    assert texts == drawn(0)
    assert texts != drawn(1)


def test_labels_repeat_in_another_order_and_never_soon():
    def pool() -> LabelPool:
        return LabelPool(fake_labels(), 1024, np.random.default_rng(0))

    one_by_one, at_once = pool(), pool()
    taken = at_once.take(10_000)
    assert taken.tolist() == np.concatenate([one_by_one.take(size) for size in (1, 1023, 5000, 3976)]).tolist()
    assert len(at_once) == 2048
    assert taken[:2048].tolist() == list(range(2048)), "each is used before any is used again"
    for start in range(0, 9000, 100):
        assert len(set(taken[start : start + 1000].tolist())) == 1000
    assert taken[2048:4096].tolist() != taken[4096:6144].tolist()


@pytest.mark.parametrize("min_split", [8, 16])
def test_no_two_pieces_of_a_row_share_a_label(min_split):
    """Also where a row has more of them than a pool is usually made for."""
    numbers = count()

    def draw(wanted: int, rng: np.random.Generator) -> list[np.ndarray]:
        return [np.array([500 + number % 400, 1000 + number // 400]) for number in islice(numbers, wanted)]

    config = UtK(probability=1.0, hops={8: 1.0}, min_split=min_split)
    docs = [Doc(np.arange(2000, 2016, dtype=np.uint32), "s")] * 12_000
    rows = list(Tangler(config, IDS, draw, np.random.default_rng(0), True).pack(docs, 1 << 18, Tally()))
    assert len(rows) == 3
    for row in rows:
        at = np.flatnonzero(row.tokens == D)
        names = row.tokens[at + 1] * 10_000 + row.tokens[at + 2]
        assert len(names) > tangle._LABELS * 2
        assert len(np.unique(names)) == len(names)


# Refused


def test_tangling_whole_rows_is_refused():
    with pytest.raises(ValueError, match="packing: single_doc puts one document in a row"):
        DatasetConfig.model_validate({"from": "a", "seq_len": "4K", "packing": "single_doc", "utk": {}})


@pytest.mark.parametrize("hops", [{}, {1: 1.0}, {9: 1.0}, {2: -1.0}, {2: 0.0}])
def test_hops_are_two_to_eight_pieces_with_shares(hops):
    with pytest.raises(ValueError, match="hops must map counts of 2 to 8 to positive shares"):
        UtK(hops=hops)
