import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unspool.data.lengths import (
    Lengths,
    add_up,
    by_edges,
    from_length,
    histogram,
    imbalance_of,
    shares_from,
)

K = 1024
lengths = st.lists(st.integers(1, 2**40), max_size=40).map(lambda lens: np.array(lens, dtype=np.int64))


def test_a_bin_holds_lengths_from_a_power_of_two_to_below_the_next():
    assert histogram(np.array([4, 7, 8, 15, 16])) == {
        "at_least": [4, 8, 16],
        "documents": [2, 2, 1],
        "tokens": [11, 23, 16],
    }


def test_empty_bins_are_kept_only_between_others():
    assert histogram(np.array([1, 70])) == {
        "at_least": [1, 2, 4, 8, 16, 32, 64],
        "documents": [1, 0, 0, 0, 0, 0, 1],
        "tokens": [1, 0, 0, 0, 0, 0, 70],
    }
    assert histogram(np.zeros(0, dtype=np.int64)) == {"at_least": [], "documents": [], "tokens": []}


@given(lengths, lengths)
def test_histograms_of_parts_add_up_to_that_of_the_whole(some, others):
    counted = Lengths()
    counted.add(some)
    counted.add(others)
    whole = histogram(np.concatenate([some, others]))
    assert counted.histogram() == add_up([histogram(some), histogram(others)]) == whole
    assert sum(whole["tokens"]) == counted.num_tokens == some.sum() + others.sum()
    assert sum(whole["documents"]) == counted.num_documents == len(some) + len(others)


def test_a_document_without_tokens_is_a_bug():
    with pytest.raises(AssertionError):
        histogram(np.array([3, 0]))


@given(lengths, st.integers(0, 41))
def test_long_documents_are_counted_exactly(lens, power):
    assert from_length(histogram(lens), 1 << power) == ((lens >= 1 << power).sum(), lens[lens >= 1 << power].sum())


def test_a_threshold_between_powers_of_two_is_a_bug():
    with pytest.raises(AssertionError, match="100 is not a power of two"):
        from_length(histogram(np.array([5])), 100)


def test_shares_of_long_documents():
    lens = np.array([100, 5 * K, 8 * K, 20 * K])
    assert shares_from(histogram(lens)) == [0.75, 0.5, 0.25, 0.0]
    assert shares_from(histogram(lens[:0])) == [None] * 4


@given(lengths)
def test_coarse_bins_lose_nothing(lens):
    coarse = by_edges(histogram(lens), (8 * K, 64 * K))
    assert coarse["at_least"] == [0, 8 * K, 64 * K]
    assert coarse["documents"] == [
        (lens < 8 * K).sum(),
        ((lens >= 8 * K) & (lens < 64 * K)).sum(),
        (lens >= 64 * K).sum(),
    ]
    assert sum(coarse["tokens"]) == lens.sum()


def test_a_histogram_is_plain_json():
    counted = histogram(np.array([3, 9, 4]))
    assert json.loads(json.dumps(counted)) == counted


def test_counts_that_do_not_add_up_are_seen():
    counts = {"tokens_in": 10, "tokens_added": 2, "tokens": 8, "dropped": {"tail": 3, "short": 1}}
    assert imbalance_of(counts) == 0
    assert imbalance_of(counts | {"tokens": 7}) == 1
    assert imbalance_of({"tokens_in": 10, "tokens": 8, "dropped": {"tail": 3}}) == -1
