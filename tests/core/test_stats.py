"""Intervals against known values and simulation."""

import math
from statistics import fmean

import numpy as np
import pytest

from unspool.core.stats import bootstrap, score_interval, sign_test, stratified_wilson, t_p_value, t_quantile, wilson


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


def test_graded_scores_get_an_interval_that_holds_the_mean_and_narrows_with_n():
    rng = np.random.default_rng(0)
    few, many = (rng.choice([0.0, 0.25, 0.5, 1.0], size=n).tolist() for n in (20, 500))

    for scores in (few, many):
        low, high = score_interval(scores)
        assert 0 <= low < fmean(scores) < high <= 1
    assert score_interval(many)[1] - score_interval(many)[0] < 0.5 * (score_interval(few)[1] - score_interval(few)[0])
    assert score_interval(few) == score_interval(few), "the same scores have the same interval"


def test_right_or_wrong_scores_get_wilsons_interval_and_one_graded_score_tells_nothing():
    assert score_interval([1.0] * 5) == wilson(5, 5)
    assert score_interval([0.5]) == (0.0, 1.0)


def test_a_bootstrap_covers_the_true_mean_about_as_often_as_claimed():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        low, high = bootstrap(rng.beta(2, 2, size=60).tolist(), draws=500)
        hits += low <= 0.5 <= high

    assert 175 <= hits <= 199


@pytest.mark.parametrize(
    ("degrees", "printed"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980), (1000, 1.962)],
)
def test_t_quantiles_are_those_of_printed_tables(degrees, printed):
    assert t_quantile(degrees) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12])
def test_t_p_values_are_integrals_of_the_density(degrees):
    norm = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    grid = np.linspace(0, 2.5, 20_001)
    density = norm * (1 + grid**2 / degrees) ** (-(degrees + 1) / 2)
    assert t_p_value(2.5, degrees) == pytest.approx(1 - 2 * np.trapezoid(density, grid), abs=1e-7)
    assert t_p_value(-2.5, degrees) == pytest.approx(t_p_value(2.5, degrees))


@pytest.mark.parametrize(("wins", "losses", "wanted"), [(4, 0, 0.125), (5, 0, 0.0625), (9, 1, 22 / 1024), (3, 3, 1.0)])
def test_the_sign_test_counts_the_tails_of_fair_coins(wins, losses, wanted):
    assert sign_test(wins - losses, wins + losses) == pytest.approx(wanted)


@pytest.mark.parametrize("shares", [[0.0, 0.2, 0.5, 0.9, 1.0], [0.5] * 5, [0.02] * 5, [0.0, 0.0, 1.0, 1.0]])
def test_stratified_intervals_cover_the_mean_and_are_no_wider_than_unstratified_ones(shares):
    rng = np.random.default_rng(0)
    covered, widths = [], []
    for _ in range(400):
        strata = [(rng.random(20) < share).astype(float).tolist() for share in shares]
        scores = [score for stratum in strata for score in stratum]
        low, high = stratified_wilson(strata)
        plain = wilson(sum(scores), len(scores))
        covered.append(low <= fmean(shares) <= high)
        widths.append((high - low) / (plain[1] - plain[0]))

    assert fmean(covered) >= 0.93
    assert max(widths) <= 1 + 1e-9
    if len(set(shares)) > 1:
        assert fmean(widths) < 0.8
