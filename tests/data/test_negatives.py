from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.core.errors import DataError
from unspool.data.corpus.store import CorpusReader, CorpusWriter
from unspool.data.packing.pack import Doc, Tally
from unspool.data.strategies import nextlong
from unspool.data.strategies.nextlong import NExtLong, build_negatives, stretches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("corpora")


def corpus(folder, name, docs):
    path = folder / f"{name}.arrow"
    with CorpusWriter(path) as writer:
        for number, tokens in enumerate(docs):
            writer.append(str(number), np.asarray(tokens, dtype=np.uint32))
    return CorpusReader([path])


def numbered(readers):
    return [Doc(reader[n], name, n) for name, reader in readers.items() for n in range(len(reader))]


def random_docs(lens, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(5000, size=size, dtype=np.uint32) for size in lens]


def pieces(row):
    return np.split(row.tokens, np.cumsum(row.doc_lens)[:-1])


def inside(part, whole):
    """Whether `part` is a stretch of `whole`."""
    part, whole = np.asarray(part), np.asarray(whole)
    starts = np.flatnonzero(whole[: len(whole) - len(part) + 1] == part[0]) if len(part) <= len(whole) else []
    return any((whole[start : start + len(part)] == part).all() for start in starts)


def build(readers, chunk, *, keep_rest=True, longest=None):
    return build_negatives(NExtLong(chunk=chunk, longest=longest), readers, keep_rest=keep_rest, embed=None)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(1, 200), min_size=4, max_size=15),
    row_len=st.integers(40, 160),
    chunk=st.integers(4, 20),
    longest=st.none() | st.integers(8, 20),
    keep_rest=st.booleans(),
    stop=st.none() | st.integers(0, 4),
    seed=st.integers(0, 99),
)
def test_rows_hold_a_document_in_order_with_chunks_of_others_between(
    folder, lens, row_len, chunk, longest, keep_rest, stop, seed
):
    docs = random_docs([*lens, 60], seed)
    half = len(docs) // 2
    readers = {"a": corpus(folder, "a", docs[:half]), "b": corpus(folder, "b", docs[half:])}
    built = build(readers, chunk, keep_rest=keep_rest, longest=longest)
    tally = Tally()
    drawn = []

    def drawing():
        for doc in numbered(readers):
            drawn.append(doc)
            yield doc

    stream = built.pack(drawing(), row_len, tally)
    rows = list(islice(stream, stop))
    stream.close()

    text_tokens = 0
    for row in rows:
        assert len(row.tokens) == row_len == row.doc_lens.sum()
        assert row.doc_lens.min() > 0 and row.attention == "full" and row.loss_mask is None
        parts = pieces(row)
        mine = [part for part, number in zip(parts, row.chunk_ids, strict=True) if number == 0]
        others = [part for part, number in zip(parts, row.chunk_ids, strict=True) if number]
        assert row.chunk_ids[0] == 0 and len(mine) >= 2 and others
        assert max(map(len, parts)) <= chunk
        text = np.concatenate(mine)
        text_tokens += len(text)
        assert len(text) <= (longest or row_len // 4)
        # Random tokens: a text is a stretch of one document only.
        (home,) = [number for number, doc in enumerate(docs) if inside(text, doc)]
        homes = {}
        for part, number in zip(parts, row.chunk_ids.tolist(), strict=True):
            if number and len(part) >= 4:
                (other,) = [index for index, doc in enumerate(docs) if inside(part, doc)]
                assert other != home
                assert homes.setdefault(number, other) == other
        assert len(set(homes.values())) == len(homes)
        assert len({part.tobytes() for part in others}) == len(others)
        assert sorted(set(row.chunk_ids.tolist())) == list(range(row.chunk_ids.max() + 1))
        assert row.source.split("+")[0] == ("a" if home < half else "b")
    tokens_in = sum(len(doc.tokens) for doc in drawn)
    assert tokens_in + tally.added == row_len * len(rows) + tally.dropped.total()
    assert tally.added == row_len * len(rows) - text_tokens
    if stop is None:
        assert built.cost["negative_tokens"] == tally.added
        if keep_rest:
            assert not tally.dropped["cut"] and not tally.dropped["limit"]


def test_every_chunk_is_followed_by_the_most_similar_one_of_another_document(folder):
    rng = np.random.default_rng(0)
    topics = [np.arange(1000 * topic, 1000 * topic + 60) for topic in range(1, 4)]
    # Each document goes through all topics, a chunk of 100 tokens each, in another order.
    orders = [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)]
    docs = [np.concatenate([rng.choice(topics[topic], 100) for topic in order]) for order in orders]
    readers = {"a": corpus(folder, "topics", docs)}
    rows = list(build(readers, 100, longest=300).pack(numbered(readers), 900, Tally()))

    assert len(rows) == 4
    for row in rows:
        assert row.doc_lens.tolist() == [100] * 9
        topic = [int(part[0]) // 1000 for part in pieces(row)]
        assert topic[0:3] == topic[0:1] * 3 and topic[3:6] == topic[3:4] * 3 and topic[6:9] == topic[6:7] * 3
        assert [number == 0 for number in row.chunk_ids] == [True, False, False] * 3


def test_negatives_are_spread_evenly(folder):
    readers = {"a": corpus(folder, "even", random_docs([400] * 30))}
    row = next(build(readers, 50).pack(numbered(readers), 1600, Tally()))
    own = np.flatnonzero(row.chunk_ids == 0)
    assert np.diff(own).tolist() == [4] * 7


def test_copies_of_the_document_are_never_negatives(folder):
    docs = random_docs([400] * 12)
    docs[5] = docs[0].copy()
    docs[6] = np.concatenate([[7] * 33, docs[0]])  # the same text under another heading
    readers = {"a": corpus(folder, "copies", docs)}
    built = build(readers, 50)
    row = next(built.pack(numbered(readers)[:1], 1600, Tally()))
    assert built.cost["copies_left_out"] >= 2
    for part, number in zip(pieces(row), row.chunk_ids, strict=True):
        assert number == 0 or not inside(part[:20], docs[0])


def test_a_text_that_two_other_documents_share_is_used_once(folder):
    docs = random_docs([400] * 12)
    docs[4] = docs[3].copy()
    readers = {"a": corpus(folder, "shared", docs)}
    for row in build(readers, 50).pack(numbered(readers)[:3], 1600, Tally()):
        texts = [part.tobytes() for part in pieces(row)]
        assert len(set(texts)) == len(texts)


def test_a_corpus_without_copies_loses_no_chunk(folder):
    readers = {"a": corpus(folder, "no-copies", random_docs([400] * 12))}
    built = build(readers, 50)
    assert list(built.pack(numbered(readers), 1600, Tally())) and built.cost["copies_left_out"] == 0


def test_many_short_negatives_fill_a_row(folder):
    # Far shorter than a chunk, so that the first search brings too few of them.
    readers = {"a": corpus(folder, "many", random_docs([120] + [8] * 100))}
    (row,) = build(readers, 40).pack(numbered(readers)[:1], 480, Tally())
    assert len(row.doc_lens) > 45


def test_long_documents_are_cut_to_a_quarter_of_the_row(folder):
    readers = {"a": corpus(folder, "long", random_docs([1000, 500, 500, 500, 500]))}
    for keep_rest, num_rows, cut in ((True, 5, 0), (False, 1, 800)):
        tally = Tally()
        rows = list(build(readers, 50, keep_rest=keep_rest).pack(numbered(readers)[:1], 800, tally))
        assert len(rows) == num_rows and tally.dropped["cut"] == cut
        assert [int(row.doc_lens[row.chunk_ids == 0].sum()) for row in rows] == [200] * num_rows


def test_documents_of_one_chunk_serve_only_as_negatives(folder):
    readers = {"a": corpus(folder, "short", random_docs([120] + [30] * 40))}
    tally = Tally()
    rows = list(build(readers, 40).pack(numbered(readers), 480, tally))
    assert len(rows) == 1 and tally.dropped == {"cut": 0, "short": 1200, "limit": 0}


def test_a_document_whose_row_cannot_be_filled_is_dropped_and_counted(folder):
    readers = {"a": corpus(folder, "alone", random_docs([100, 30]))}
    tally = Tally()
    assert not list(build(readers, 20).pack(numbered(readers), 400, tally))
    assert tally.dropped["alone"] == 130 and not tally.added


def test_the_same_input_gives_the_same_rows(folder):
    readers = {"a": corpus(folder, "again", random_docs([300] * 10))}
    first, second = (
        [row.tokens.tobytes() for row in build(readers, 30).pack(numbered(readers), 600, Tally())] for _ in range(2)
    )
    assert first == second and len(first) == 20


def test_a_large_corpus_is_indexed_in_part(folder, monkeypatch, capsys):
    monkeypatch.setattr(nextlong, "INDEX_TOKENS", 600)
    docs = random_docs([200] * 20)
    readers = {"a": corpus(folder, "large", docs)}
    chunks = nextlong.cut_corpora(readers, 20)
    assert len(chunks.texts) == 30 and len(set(chunks.owners.tolist())) == 20
    for text, owner in zip(chunks.texts, chunks.owners.tolist(), strict=True):
        assert inside(text, docs[owner])
    assert "every 6.7th" in capsys.readouterr().err


@pytest.mark.parametrize(("lens", "message"), [([10, 20], "longest document has 20"), ([100], "only one document")])
def test_corpora_without_negatives_are_refused(folder, lens, message):
    with pytest.raises(DataError, match=message):
        build({"a": corpus(folder, "none", random_docs(lens))}, 40)


def test_equal_texts_have_equal_stretches_and_others_have_none_in_common():
    text, other = random_docs([600, 600])
    assert stretches(text) == stretches(text.copy())
    assert 30 < len(stretches(text)) < 130  # about one in eight
    assert not stretches(text) & stretches(other)
    assert stretches(text[100:400]) <= stretches(text)
    assert stretches(text[:3]) == stretches(text[:3])
