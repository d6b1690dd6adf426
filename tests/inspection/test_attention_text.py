"""The text that attention is looked at on, and the colors it is drawn in."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from factory import build_tokenizer
from unspool.core.errors import ConfigError, DataError
from unspool.data.tokenize.encoder import build_encoder
from unspool.inspection.attention.input_text import Text, TextSettings, read_files, share_length, shuffle_pieces
from unspool.inspection.attention.maps import DIFFERENCE, MAP, map_png


@pytest.fixture(scope="module")
def encoder():
    return build_encoder(build_tokenizer())


def documents(*lens: int) -> list[np.ndarray]:
    """All tokens differ, so that pieces can be distinguished."""
    ends = np.cumsum(lens)
    return [np.arange(end - size, end) for end, size in zip(ends, lens, strict=True)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_a_length_is_met_exactly_and_as_equally_as_documents_allow(lens, data):
    length = data.draw(st.integers(len(lens), sum(lens)))
    kept = [len(doc) for doc in share_length(documents(*lens), length)]
    assert sum(kept) == length
    assert all(1 <= keep <= size for keep, size in zip(kept, lens, strict=True))
    cut = [keep for keep, size in zip(kept, lens, strict=True) if keep < size]
    # Whoever was cut has as much as anybody else, but for a token that does not divide.
    assert not cut or max(kept) - min(cut) <= 1


def test_a_length_that_cannot_be_met_is_refused():
    with pytest.raises(ConfigError, match="has only 30 tokens"):
        share_length(documents(10, 20), 31)
    with pytest.raises(ConfigError, match="each of 2 documents"):
        share_length(documents(10, 20), 1)


def test_pieces_hold_every_token_once_and_neighbors_are_joined():
    docs = documents(40, 30, 50)
    for seed in range(20):
        pieces = shuffle_pieces(docs, 3, seed)
        assert sorted(np.concatenate([tokens for _, tokens in pieces]).tolist()) == list(range(120))
        for number, tokens in pieces:
            assert (np.diff(tokens) == 1).all() and tokens[0] in docs[number]
        assert not any(a[1][-1] + 1 == b[1][0] and a[0] == b[0] for a, b in pairwise(pieces))
    orders = {tuple(number for number, _ in shuffle_pieces(docs, 3, seed)) for seed in range(20)}
    assert len(orders) > 5
    assert all(
        np.array_equal(a[1], b[1]) for a, b in zip(shuffle_pieces(docs, 3, 7), shuffle_pieces(docs, 3, 7), strict=True)
    )
    with pytest.raises(ConfigError, match="use fewer"):
        shuffle_pieces(documents(2), 3, 0)


def test_documents_alternate_between_files(encoder, tmp_path):
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    text = read_files(files, encoder, TextSettings())
    assert text.doc_names == ("a.jsonl:1", "b.jsonl:1", "a.jsonl:2", "b.jsonl:2")
    assert np.array_equal(text.tokens, np.concatenate(encoder.encode(["a 0", "b 0", "a 1", "b 1"])))
    assert text.piece_names == ["1", "2", "3", "4"]
    assert len(read_files(files, encoder, TextSettings(num_docs=7)).doc_names) == 7
    with pytest.raises(DataError, match="line 2"):
        (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
        read_files([tmp_path / "bad.jsonl"], encoder, TextSettings())


def test_pieces_are_named_by_their_document_and_letters():
    text = Text(
        tokens=np.zeros(6, dtype=np.uint32), piece_lens=(1, 2, 3), chunk_ids=(0, 1, 0), doc_names=("", ""), origin=""
    )
    assert text.piece_names == ["1a", "2", "1b"]


def test_colors_follow_the_power_of_ten_and_the_sign():
    assert MAP.places(np.array([0, 1e-5, 1e-3, 1, 2])).tolist() == pytest.approx([0, 0, 0.4, 1, 1])
    found = DIFFERENCE.places(np.array([-1, -1e-2, -1e-5, 0, 1e-5, 1e-2, 1]))
    assert found.tolist() == pytest.approx([0, 0.25, 0.5, 0.5, 0.5, 0.75, 1])
    for scale in (MAP, DIFFERENCE):
        for place, name in scale.ticks():
            share = float(name.replace("−", "-").rstrip("%")) / 100
            assert scale.places(np.array([share]))[0] == pytest.approx(place)


def test_a_picture_does_not_change_the_map():
    values = np.tril(np.full((9, 9), 0.5, dtype=np.float32))
    before = values.copy()
    assert map_png(values, MAP) == map_png(values, MAP)
    assert np.array_equal(values, before)
