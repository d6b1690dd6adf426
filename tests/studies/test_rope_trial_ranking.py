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
