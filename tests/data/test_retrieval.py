import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.data.strategies.retrieval import BM25, K1, B, Embeddings, best

NONE = slice(0, 0)


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.uint32)


def naive_scores(chunks: list[np.ndarray], terms: list[int]) -> list[float]:
    """BM25 as the book has it, word by word."""
    mean_len = sum(map(len, chunks)) / len(chunks)
    scores = []
    for chunk in chunks:
        counts = Counter(chunk.tolist())
        norm = K1 * (1 - B + B * len(chunk) / mean_len)
        score = 0.0
        for term in terms:
            having = sum(term in other for other in chunks)
            idf = math.log(1 + (len(chunks) - having + 0.5) / (having + 0.5))
            score += idf * counts[term] / (counts[term] + norm)
        scores.append(score)
    return scores


tokens = st.lists(st.integers(0, 30), min_size=1, max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


@given(st.lists(tokens, min_size=1, max_size=12), tokens)
def test_scores_are_those_of_bm25(chunks, query):
    index = BM25(chunks, query_terms=None)

    shared = [term for term in sorted(set(query.tolist())) if sum(term in chunk for chunk in chunks) > 1]
    assert sorted(index.terms(query).tolist()) == shared
    np.testing.assert_allclose(index.scores(query), naive_scores(chunks, shared), rtol=1e-4, atol=1e-6)


def test_the_most_telling_words_are_looked_up():
    # 1 is in every chunk, 2 in three, 3 in two, 4 in one; the query has 2 three times.
    chunks = [array(1, 2, 3, 4), array(1, 2, 3), array(1, 2), array(1)]
    index = BM25(chunks, query_terms=2)
    assert index.terms(array(1, 2, 2, 2, 3, 4, 99)).tolist() == [2, 3]


def test_a_planted_chunk_on_the_same_topic_is_found_first():
    rng = np.random.default_rng(0)
    common = np.arange(200)
    chunks = [rng.choice(common, 300).astype(np.uint32) for _ in range(50)]
    topic = np.arange(1000, 1020, dtype=np.uint32)
    for number in (7, 31):
        chunks[number][:40] = rng.choice(topic, 40)
    query = np.concatenate([rng.choice(common, 200).astype(np.uint32), topic])
    assert set(BM25(chunks).search([query], 2, NONE)[0].tolist()) == {7, 31}


def test_hidden_chunks_are_never_found_and_equal_scores_are_in_order():
    index = BM25([array(1, 2)] * 6)
    assert index.search([array(1, 2)], 3, slice(1, 3))[0].tolist() == [0, 3, 4]
    assert index.search([array(1, 2)], 99, slice(1, 3))[0].tolist() == [0, 3, 4, 5]


def test_words_that_the_index_never_saw_find_nothing_in_particular():
    assert BM25([array(1), array(2)]).search([array(50, 60)], 1, NONE)[0].tolist() == [0]


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, -np.inf]), max_size=20), st.integers(0, 25))
def test_best_is_a_stable_sort(values, k):
    scores = np.array(values, dtype=np.float32)
    expected = [int(i) for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > -np.inf]
    assert best(scores, k).tolist() == expected


@pytest.mark.parametrize("at_once", [3, 1000])
def test_embeddings_find_the_nearest_by_cosine(monkeypatch, at_once):
    monkeypatch.setattr("unspool.data.strategies.retrieval._COMPARE_AT_ONCE", at_once)
    monkeypatch.setattr("unspool.data.strategies.retrieval._EMBED_AT_ONCE", at_once)
    vectors = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    vectors[17] = vectors[4] * 2  # the same direction; a power of two rounds nothing
    index = Embeddings([array(n) for n in range(40)], lambda texts: vectors[[int(text[0]) for text in texts]])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for query in range(40):
        cosines = unit @ unit[query]
        cosines[5:9] = -np.inf
        found = index.search([array(query), array(0)], 6, slice(5, 9))[0]
        np.testing.assert_allclose(cosines[found], np.sort(cosines)[::-1][:6], atol=1e-6)
        assert not set(found.tolist()) & set(range(5, 9))
    assert index.search([array(4)], 2, NONE)[0].tolist() == [4, 17]


def test_a_vector_of_zeros_is_like_nothing():
    index = Embeddings([array(0), array(1)], lambda texts: np.array([[float(text[0]), 0.0] for text in texts]))
    assert index.search([array(1)], 2, NONE)[0].tolist() == [1, 0]


def test_jax_is_not_touched(tmp_path):
    """As soon as it computes anything, it takes most of a GPU's memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('imported')")
    code = "import unspool.data.strategies.retrieval, sys; assert 'jax' not in sys.modules; print('before'); import jax"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["before", "imported"]
