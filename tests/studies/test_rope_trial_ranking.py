"""The ranking of a trial of RoPE methods: means, paired differences and ranges of positions, against plain Python."""

import math
import statistics

import numpy as np
import pytest
import scipy.stats

from unspool.core.errors import DataError
from unspool.studies.rope_trial.ranking import merge_ranges, range_counts, range_edges, range_means, rank


def numbers(seed: int, windows: int = 6, ranges: int = 3) -> dict[str, tuple[float, ...]]:
    rng = np.random.default_rng(seed)
    return {f"w{at}": tuple(rng.normal(4, 0.5, ranges)) for at in range(windows)}


def test_ranks_and_intervals_are_those_of_plain_python():
    edges = [0, 100, 200, 350]
    measured = {"a": numbers(1), "b": numbers(2), "c": numbers(3)}

    found = rank(measured, edges, reference="b")

    beyond = {
        label: {window: (100 * each[1] + 150 * each[2]) / 250 for window, each in losses.items()}
        for label, losses in measured.items()
    }
    means = {label: statistics.fmean(values.values()) for label, values in beyond.items()}
    assert [one.label for one in found] == sorted(means, key=means.get)
    best = found[0].label
    for one in found:
        assert one.beyond == pytest.approx(means[one.label])
        assert one.inside == pytest.approx(statistics.fmean(each[0] for each in measured[one.label].values()))
        for got, other, of in ((one.to_best, best, beyond), (one.inside_cost, "b", None)):
            if one.label == other:
                assert got is None
                continue
            pairs = [
                (of[one.label][w] - of[other][w]) if of else measured[one.label][w][0] - measured[other][w][0]
                for w in measured["a"]
            ]
            # Two comparisons share the error of 5%.
            half = scipy.stats.t.ppf(1 - 0.05 / 4, 5) * statistics.stdev(pairs) / math.sqrt(6)
            assert (got.low, got.high) == pytest.approx(
                (statistics.fmean(pairs) - half, statistics.fmean(pairs) + half)
            )
            assert got.is_told_apart == (abs(statistics.fmean(pairs)) > half)


def test_equal_candidates_are_not_told_apart_and_a_shifted_one_is():
    same = numbers(1)
    shifted = {window: (each[0], each[1] + 0.01, each[2] + 0.01) for window, each in same.items()}
    found = rank({"same": same, "again": dict(same), "shifted": shifted}, [0, 100, 200, 350])

    assert [one.label for one in found] == ["again", "same", "shifted"]
    assert not found[1].to_best.is_told_apart
    assert found[2].to_best.is_told_apart and found[2].to_best.mean == pytest.approx(0.01)


def test_windows_that_agree_within_a_book_widen_the_intervals():
    """Six books of four windows: the difference varies between books only."""
    edges, books, each = [0, 100, 200], 6, 4
    by_book = np.array([0.3, -0.05, 0.25, -0.1, 0.2, 0.1])
    windows = {f"w{book}{at}": book for book in range(books) for at in range(each)}
    a = dict.fromkeys(windows, (4.0, 4.0))
    b = {window: (4.0, 4.0 + by_book[book]) for window, book in windows.items()}

    alone, clustered = (
        rank({"a": a, "b": b}, edges, documents=documents)[1].to_best
        for documents in (None, {window: f"book {book}" for window, book in windows.items()})
    )

    # As good as one window per book.
    half = scipy.stats.t.ppf(0.975, books - 1) * statistics.stdev(by_book) / math.sqrt(books)
    assert (clustered.low, clustered.high) == pytest.approx((by_book.mean() - half, by_book.mean() + half))
    assert clustered.mean == alone.mean
    assert clustered.high - clustered.low > 2 * (alone.high - alone.low)
    assert alone.is_told_apart and not clustered.is_told_apart


@pytest.mark.parametrize("books", [1, 3, 24])
def test_few_books_and_a_book_per_window_leave_the_interval_over_windows(books):
    measured = {"a": numbers(1, windows=24), "b": numbers(2, windows=24)}
    documents = {window: f"book {at % books}" for at, window in enumerate(measured["a"])}
    plain, clustered = (rank(measured, [0, 100, 200, 350], documents=each) for each in (None, documents))
    assert plain == clustered


def test_windows_that_differ_within_a_book_do_not_narrow_the_intervals():
    opposite = {f"w{at}": (4.0, 4.0 + 0.1 * (-1) ** at) for at in range(8)}
    measured = {"a": dict.fromkeys(opposite, (4.0, 3.9)), "b": opposite}
    documents = {window: f"book {at // 2}" for at, window in enumerate(opposite)}
    plain, clustered = (rank(measured, [0, 100, 200], documents=each) for each in (None, documents))
    assert plain == clustered


def test_other_windows_are_refused():
    with pytest.raises(DataError, match="b was measured on other windows than a"):
        rank({"a": numbers(1), "b": {f"x{key}": value for key, value in numbers(2).items()}}, [0, 100, 200, 350])


@pytest.mark.parametrize(
    ("old", "context", "edges"),
    [
        (256, 1024, [0, 256, 512, 1024]),
        (256, 300, [0, 256, 300]),
        (256, 512, [0, 256, 512]),
        (256, 520, [0, 256, 520]),
        (256, 800, [0, 256, 512, 800]),
        (8192, 1 << 16, [0, 8192, 1 << 14, 1 << 15, 1 << 16]),
    ],
)
def test_ranges_double_from_the_old_context_to_the_new_one(old, context, edges):
    assert range_edges(old, context) == edges
    losses = np.random.default_rng(0).normal(size=context - 1)
    means, counts = range_means(losses, edges), range_counts(edges)
    assert counts.sum() == context - 1
    assert means[0] == losses[: old - 1].mean() and means[-1] == losses[edges[-2] - 1 :].mean()
    assert np.dot(means, counts) == pytest.approx(losses.sum())
    for count in (1, 2, 3):
        merged, spans = merge_ranges(means, edges, count)
        sizes = np.diff(spans)
        assert (spans[0], spans[-1]) == (old, context) and len(merged) <= count
        assert np.dot(merged, sizes) == pytest.approx(losses[old - 1 :].sum())
