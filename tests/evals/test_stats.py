import math
from statistics import fmean

import numpy as np
import pytest

from unspool.evals.stats import bootstrap, interval, wilson
from unspool.evals.summary import accuracy_cells, loss_cells


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # From the closed form: n = 10 gives 10/13.8416 and 3.8416/13.8416 at the ends.
        (10, 10, 10 / 13.8416, 1.0),
        (0, 10, 0.0, 3.8416 / 13.8416),
        # Known values of the 95% Wilson interval.
        (17, 20, 0.6396, 0.9476),
        (1, 20, 0.0089, 0.2361),
        (50, 100, 0.4038, 0.5962),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval_has_its_known_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_interval_stays_within_0_and_1_and_around_the_share():
    for n in (1, 2, 7, 500):
        for successes in range(n + 1):
            low, high = wilson(successes, n)
            assert 0 <= low <= successes / n <= high <= 1
            assert low < high


def sample(score: float, *, length: int = 256, depth: float | None = None, suite: str = "niah") -> dict:
    return {"suite": suite, "length": length, "depth": depth, "score": score}


def test_cells_cover_all_depths_together_and_each_alone():
    samples = [
        sample(1.0, depth=0.0),
        sample(0.0, depth=0.0),
        sample(1.0, depth=1.0),
        sample(0.0, depth=1.0, length=512),
        sample(0.0, suite="key_value"),
    ]

    cells = accuracy_cells("niah", 256, [0.0, 0.5, 1.0], samples)

    assert [(cell["depth"], cell["value"], cell["n"]) for cell in cells] == [
        (None, pytest.approx(2 / 3), 3),
        (0.0, 0.5, 2),
        (0.5, None, 0),
        (1.0, 1.0, 1),
    ]
    assert all(cell["metric"] == "accuracy" and cell["length"] == 256 for cell in cells)
    assert (cells[1]["low"], cells[1]["high"]) == wilson(1, 2)


def test_what_was_not_scored_is_null_not_zero():
    (cell,) = accuracy_cells("key_value", 256, [], [])

    assert cell["n"] == 0
    assert cell["value"] is cell["low"] is cell["high"] is None


def window(*values: float, n: int = 64, length: int = 128) -> dict:
    losses = [{"from": 64 * at, "to": 64 * at + 64, "value": value, "n": n} for at, value in enumerate(values)]
    return {"suite": "perplexity", "length": length, "losses": losses}


def test_loss_cells_average_tokens_and_take_their_interval_from_windows():
    cells = loss_cells("perplexity", 128, [window(3.0, 2.0), window(5.0, 2.0), window(9.0, length=64)])

    assert [(cell["from"], cell["to"], cell["value"], cell["n"]) for cell in cells] == [
        (0, 64, 4.0, 128),
        (64, 128, 2.0, 128),
    ]
    # Standard deviation of (3, 5) is √2; over two windows, 1.96·√2/√2.
    assert (cells[0]["low"], cells[0]["high"]) == pytest.approx((4 - 1.96, 4 + 1.96))
    assert cells[1]["low"] == cells[1]["high"] == 2.0


def test_one_window_gives_a_mean_without_an_interval():
    cells = loss_cells("perplexity", 128, [window(3.0, 2.0)])

    assert [cell["value"] for cell in cells] == [3.0, 2.0]
    assert all(cell["low"] is None and cell["high"] is None for cell in cells)
    assert not any(math.isnan(cell["value"]) for cell in cells)


def test_graded_scores_get_an_interval_that_holds_the_mean_and_narrows_with_n():
    rng = np.random.default_rng(0)
    few, many = (rng.choice([0.0, 0.25, 0.5, 1.0], size=n).tolist() for n in (20, 500))

    for scores in (few, many):
        low, high = interval(scores)
        assert 0 <= low < fmean(scores) < high <= 1
    assert interval(many)[1] - interval(many)[0] < 0.5 * (interval(few)[1] - interval(few)[0])
    assert interval(few) == interval(few), "the same scores have the same interval"


def test_right_or_wrong_scores_get_wilsons_interval_and_one_graded_score_tells_nothing():
    assert interval([1.0] * 5) == wilson(5, 5)
    assert interval([0.5]) == (0.0, 1.0)


def test_a_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        low, high = bootstrap(rng.beta(2, 2, size=60).tolist(), draws=500)
        hits += low <= 0.5 <= high

    assert 175 <= hits <= 199
