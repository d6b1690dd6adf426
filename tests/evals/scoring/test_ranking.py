"""Rankings: what is read of an output, and nDCG by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.evals.scoring import ranking
from unspool.evals.scoring.ranking import ndcg, parse_ranking


@pytest.mark.parametrize(
    ("output", "ids"),
    [
        ("Ranking: ID3 > ID1 > ID2", ["3", "1", "2"]),
        ("[ID: 3] > [ID: 1]", ["3", "1"]),
        ("7 > 7 > 2 > 7 > 1", ["7", "2", "1"]),  # duplicates keep the first place
        ("1 > 2 and then 3 > 4 > 5", ["3", "4", "5"]),  # the longest chain
        ("12\n> 4", ["12", "4"]),
        ("None of them", ["none of them"]),
        ("", [""]),
    ],
)
def test_the_longest_chain_is_read(output: str, ids: list[str]):
    assert parse_ranking(output) == ids


def test_ndcg_by_hand():
    relevance = {"a": 3, "b": 1, "c": 0}
    ideal = 3 + 1 / math.log2(3)
    assert ndcg(["a", "b"], relevance) == pytest.approx(1)
    assert ndcg(["b", "a"], relevance) == pytest.approx((1 + 3 / math.log2(3)) / ideal)
    assert ndcg(["x", "a"], relevance) == pytest.approx(3 / math.log2(3) / ideal)  # an unknown id takes a place
    assert ndcg([*"cdefghijkl", "a"], relevance) == 0  # beyond the tenth
    assert ndcg(["a"], {"a": 0}) == 0


@given(st.permutations(range(12)), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_no_order_beats_the_order_of_the_grades(order: list[int], grades: list[int]):
    relevance = {str(at): grade for at, grade in enumerate(grades)}
    score = ndcg([str(at) for at in order], relevance)
    best = ndcg(sorted(relevance, key=lambda at: -relevance[at]), relevance)
    assert 0 <= score <= best + 1e-12
    assert best == pytest.approx(1 if any(grades) else 0)


def test_exponential_gains_would_show(monkeypatch: pytest.MonkeyPatch):
    plain = ranking._gain
    monkeypatch.setattr(ranking, "_gain", lambda grades: plain([2**grade - 1 for grade in grades]))
    ideal = 3 + 1 / math.log2(3)
    assert ndcg(["b", "a"], {"a": 3, "b": 1}) != pytest.approx((1 + 3 / math.log2(3)) / ideal)
