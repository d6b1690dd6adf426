"""What every tangled row promises, over drawn settings, documents and tokenizers."""

import operator
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unspool.data.packing.pack import Doc, Tally
from unspool.data.packing.row import IGNORE, Row, labels
from unspool.data.strategies.utk import UtK
from unspool.data.strategies.utk.special_tokens import knot_ids, label_drawer
from unspool.data.strategies.utk.tangle import Tangler, untangle
from unspool.data.tokenize.encoder import build_encoder
from unspool.models.location import resolve_path
from unspool.models.tokenizer import load_tokenizer

from .conftest import build_tokenizer, prose
from .slow_tangle import slow_mask, slow_pieces, slow_released_mask, slow_rows, slow_solutions

FAMILIES = ("tiny-base", "byte-level", "with BOS", "WordPiece", "Unigram")
# Text without EOS, as `longest` cuts it.
CUT = "byte-level, documents without EOS"


def _trained(model: object, trainer: object) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Lowercase() if isinstance(model, models.WordPiece) else None
    backend.pre_tokenizer = (
        pre_tokenizers.Whitespace() if isinstance(model, models.WordPiece) else pre_tokenizers.Metaspace()
    )
    backend.train_from_iterator([prose(300, seed=3)] * 4, trainer)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]")


@cache
def family(name: str) -> SimpleNamespace:
    """A tokenizer with knots, and some text to draw documents from."""
    tokenizer = {
        "tiny-base": lambda: load_tokenizer(resolve_path("asset:tiny-base", Path())),
        "byte-level": build_tokenizer,
        CUT: build_tokenizer,
        "with BOS": lambda: build_tokenizer(bos=True),
        "WordPiece": lambda: _trained(
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False),
        ),
        "Unigram": lambda: _trained(
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=120, special_tokens=["[UNK]"], unk_token="[UNK]", show_progress=False),
        ),
    }[name]()
    knots = knot_ids(tokenizer, 8)
    encoder = build_encoder(tokenizer)
    texts = encoder.encode([prose(60 + number % 40, seed=number) for number in range(40)])
    pool = encoder.encode_plain([_label(number) for number in range(128)])
    return SimpleNamespace(knots=knots, eos=encoder.eos, bos=encoder.bos, texts=texts, pool=pool, encoder=encoder)


def _label(number: int) -> str:
    return "".join(chr(65 + value) for value in np.random.default_rng(number).integers(26, size=6))


def few_labels(made: SimpleNamespace):
    """Tokenised beforehand: a thousand labels for each of a thousand cases would take all the time."""
    pool = [label for label in made.pool if len(label)]

    def draw(count: int, rng: np.random.Generator) -> list[np.ndarray]:
        order = rng.permutation(len(pool))
        return ([pool[number] for number in order] * (1 + count // len(pool)))[:count]

    return draw


@st.composite
def cases(draw) -> SimpleNamespace:
    name = draw(st.sampled_from((*FAMILIES, CUT)))
    made = family(name)
    # Lengths by a seed: drawing them one by one takes most of the time.
    seed = draw(st.integers(0, 10**6))
    longest = draw(st.sampled_from([4, 40, 130]))
    lens = np.random.default_rng(seed).integers(1, longest + 1, size=draw(st.integers(6, 30)))
    first = draw(st.integers(0, 39))
    docs = []
    for number, length in enumerate(lens.tolist()):
        text = made.texts[(first + number) % len(made.texts)]
        body = text[: -1 if len(text) <= length else length - 1]
        docs.append(body.copy() if name == CUT and len(body) else np.append(body, np.uint32(made.eos)))
    hops = draw(st.sampled_from([{2: 1.0}, {3: 1.0}, {2: 0.5, 3: 0.5}, {8: 1.0}, {2: 1.0, 5: 2.0, 8: 1.0}]))
    config = UtK(
        probability=draw(st.sampled_from([0.0, 0.5, 1.0])),
        per=draw(st.sampled_from(["document", "row"])),
        hops=hops,
        chunk=draw(st.sampled_from([None, None, 16])),
        split=draw(st.sampled_from(["random", "equal"])),
        min_split=draw(st.sampled_from([1, 8, 30])),
        preserve_order=draw(st.booleans()),
        backtrace=draw(st.booleans()),
        mask=draw(st.sampled_from(["paper", "released"])),
    )
    case = SimpleNamespace(
        name=name,
        made=made,
        docs=docs,
        config=config,
        row_len=draw(st.integers(20, 300)),
        seed=seed,
        keep_rest=draw(st.booleans()),
        stop=draw(st.sampled_from([None, None, 1, 3])),
    )
    case.rows, case.tally, case.drawn, case.counts = tangle(case)
    case.masks_differ = 0
    return case


def tangle(case: SimpleNamespace) -> tuple[list[Row], Tally, int, dict[str, int]]:
    drawn = 0

    def counted():
        nonlocal drawn
        for doc in case.docs:
            drawn += len(doc)
            yield Doc(doc, "s")

    made, tally = case.made, Tally()
    rng = np.random.default_rng(case.seed)
    tangler = Tangler(case.config, made.knots, few_labels(made), rng, case.keep_rest)
    stream = tangler.pack(counted(), case.row_len, tally)
    rows = list(islice(stream, case.stop))
    stream.close()
    return rows, tally, drawn, tangler.counts


def check(case: SimpleNamespace) -> None:
    slow = slow_rows(
        case.docs,
        case.row_len,
        case.config,
        case.made.knots,
        few_labels(case.made),
        np.random.default_rng(case.seed),
        keep_rest=case.keep_rest,
    )
    check_same(case, slow)
    check_accounts(case, slow)
    for row, expected in zip(case.rows, slow, strict=False):
        assert len(row.tokens) == case.row_len == row.doc_lens.sum()
        pieces = slow_pieces(row.tokens.tolist(), row.doc_lens.tolist(), row.chunk_ids.tolist(), case.made.knots)
        check_documents(case, row, expected)
        check_order(case, pieces)
        check_solutions(case, row, pieces, cut=len(expected.texts) - 1 if expected.cut else None)
        check_mask(case, row)
    assert case.counts == {"masks_differ": case.masks_differ}


def check_same(case, slow):
    """Byte for byte what the slow code writes, which draws the same numbers."""
    assert len(case.rows) == len(slow[: case.stop])
    for row, expected in zip(case.rows, slow, strict=False):
        assert row.tokens.tolist() == expected.tokens
        assert row.doc_lens.tolist() == expected.doc_lens
        assert row.chunk_ids.tolist() == expected.chunk_ids
        assert (row.attention, row.source) == ("full", "s")
        assert (row.tokens.dtype, row.doc_lens.dtype, row.chunk_ids.dtype) == (np.uint32, np.int32, np.int32)


def check_accounts(case, slow):
    in_rows = sum(len(text) for row in slow[: len(case.rows)] for text in row.texts)
    assert case.tally.added == len(case.rows) * case.row_len - in_rows
    assert case.drawn + case.tally.added == len(case.rows) * case.row_len + case.tally.dropped.total()
    touched = {doc for row in slow[: len(case.rows)] for doc in row.documents}
    stopped = case.stop is not None and len(case.rows) == case.stop
    assert case.tally.given_back == (len(case.docs) - len(touched) if stopped else 0)
    assert set(+case.tally.dropped) <= {"cut" if not case.keep_rest else "", "limit", "unread", "last_row"}
    assert not (stopped and case.tally.dropped["last_row"])
    assert stopped or not (case.tally.dropped["limit"] or case.tally.dropped["unread"])


def check_documents(case, row, expected):
    """Untangling gives every document of the row, the cut one as far as the row holds it."""
    back = untangle(row.tokens, row.doc_lens, row.chunk_ids, case.made.knots)
    assert [doc.tolist() for doc in back] == expected.texts
    for number, text in zip(expected.documents[1:-1], back[1:-1], strict=False):
        assert np.array_equal(text, case.docs[number]), "only the first and the last document of a row may be cut"


def check_order(case, pieces):
    for doc in {piece.doc for piece in pieces}:
        mine = [piece for piece in pieces if piece.doc == doc]
        parts = [piece.part for piece in mine]
        assert sorted(parts) == list(range(len(parts)))
        if case.config.chunk:
            assert len(parts) <= 8
        else:
            assert len(parts) in (1, *case.config.hops)
        assert not case.config.preserve_order or parts == sorted(parts)
        assert all(piece.has_tail == (piece.part < len(parts) - 1) for piece in mine)
        assert all(piece.text for piece in mine)
        if case.config.split == "equal" or case.config.chunk:
            sizes = [len(piece.text) for piece in mine]
            assert max(sizes) - min(sizes) <= 1
        if len(parts) > 1:
            assert sum(len(piece.text) for piece in mine) >= case.config.min_split


def check_solutions(case, row, pieces, cut):
    tokens = row.tokens.tolist()
    labelled = {piece.doc for piece in pieces if piece.label is not None}
    split = {piece.doc for piece in pieces if piece.part > 0}
    assert labelled == (split - {cut} if case.config.backtrace else set()), "a cut document has no labels"
    expected = []
    for doc in labelled:
        mine = [piece for piece in pieces if piece.doc == doc]
        last = mine[-1]
        assert all(piece.label is not None for piece in mine)
        end = last.start + int(row.doc_lens[pieces.index(last)])
        listed = [piece.label for piece in sorted(mine, key=lambda piece: piece.part)]
        size = sum(map(len, listed)) + len(listed) + 1
        expected.append((end - size, listed))
    assert slow_solutions(tokens, case.made.knots) == sorted(expected), "one at the end of each last piece"


def check_mask(case, row):
    starts = (np.cumsum(row.doc_lens) - row.doc_lens).tolist()
    paper = slow_mask(row.tokens.tolist(), case.made.knots, starts)
    released = slow_released_mask(row.tokens.tolist(), case.made.knots, case.made.eos)
    if case.name == CUT:
        # The released rules know documents by their EOS; without one, a piece's first token must not be asked for.
        for start in starts:
            released[start] = False
    assert row.loss_mask.tolist() == (paper if case.config.mask == "paper" else released)
    case.masks_differ += sum(map(operator.ne, paper, released))
    targets = labels(row.tokens, row.doc_lens, row.loss_mask)
    as_one = labels(row.tokens, np.array([len(row.tokens)]), row.loss_mask)
    assert np.array_equal(targets, as_one), "the mask alone must keep pieces apart, since the row is one sequence"
    assert (targets[np.cumsum(row.doc_lens) - 1] == IGNORE).all()


@settings(max_examples=600, deadline=None)
@given(cases())
def test_tangled_rows_keep_every_promise(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(cases())
def test_tangled_rows_keep_every_promise_in_many_more_cases(case):
    check(case)


@pytest.mark.parametrize("name", FAMILIES)
def test_labels_are_drawn_by_the_tokenizer_and_spell_six_characters(name):
    made = family(name)
    drawn = label_drawer(made.encoder)(200, np.random.default_rng(0))
    again = label_drawer(made.encoder)(200, np.random.default_rng(0))
    assert all(np.array_equal(label, other) for label, other in zip(drawn, again, strict=True))
    assert not set(np.concatenate(drawn).tolist()) & {*made.knots.values(), made.eos, *made.bos}
    assert all(len(label) for label in drawn)
