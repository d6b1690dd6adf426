"""Intervals over seeds and questions: hand-worked cases, a plain reference, invariance, and coverage in simulation."""

import importlib.util
import math
import sys
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest
from scipy import stats

from unspool.studies.arm_comparison import over_prompts
from unspool.studies.arm_scores import Answer, Measure, Part
from unspool.studies.two_level import arm_interval, difference_interval, seed_variance

PATH = Path(__file__).parents[2] / "tools" / "interval_coverage.py"
spec = importlib.util.spec_from_file_location("unspool_coverage", PATH)
assert spec is not None and spec.loader is not None
coverage = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = coverage
spec.loader.exec_module(coverage)


def contributions(gains, *, shared=False):
    """One row of differences per seed; `shared`: all seeds answer the same questions."""
    n = len(gains[0])
    return {
        seed: {f"{0 if shared else seed}-{at}": gain / n for at, gain in enumerate(row)}
        for seed, row in enumerate(gains)
    }


def plain_variance(gains, *, shared):
    """S + C, in plain Python: variance of seeds' means over k, and the mean covariance of pairs of seeds over n."""
    k, n = len(gains), len(gains[0])
    means = [fmean(row) for row in gains]
    total = variance(means) / k
    if not shared:
        return total
    pairs = []
    for a, b in combinations(range(k), 2):
        products = [(x - means[a]) * (y - means[b]) for x, y in zip(gains[a], gains[b], strict=True)]
        pairs.append(sum(products) / (n - 1) / n)
    return total + max(0.0, fmean(pairs))


# By hand


def test_three_seeds_by_hand():
    """Means 0.2, 0.3, 0.4: standard error 0.1 / √3, two degrees of freedom, t = 4.3027."""
    found = {seed: {f"{seed}-{at}": value / 100 for at in range(100)} for seed, value in enumerate((0.2, 0.3, 0.4))}
    one = difference_interval(found, bounded=False)
    assert one.value == pytest.approx(0.3)
    assert (one.low, one.high) == pytest.approx((0.3 - 4.3027 * 0.057735, 0.3 + 4.3027 * 0.057735), abs=1e-4)
    assert one.p == pytest.approx(0.0351, abs=2e-4)
    assert (one.seeds, one.questions) == (3, 300)


def test_one_seed_has_the_interval_over_questions():
    found = contributions([[1, 0, 0, 1, -1, 1, 0, 1]])
    one, test = difference_interval(found, bounded=True), over_prompts(found, bounded=True)
    assert (one.low, one.high, one.p) == (test.low, test.high, test.p)


def test_nothing_in_common_has_no_interval():
    assert difference_interval({}, bounded=True) is None


@pytest.mark.parametrize("shared", [False, True])
def test_variance_is_that_of_the_plain_formula(shared):
    rng = np.random.default_rng(0)
    for _ in range(20):
        gains = (rng.normal(size=12) + rng.normal(size=(4, 1)) + rng.normal(size=(4, 12))).tolist()
        found, degrees = seed_variance(contributions(gains, shared=shared))
        assert found == pytest.approx(plain_variance(gains, shared=shared))
        assert 3 <= degrees <= 3 + 11
        assert shared or degrees == pytest.approx(3)


def test_shared_questions_are_a_common_error_of_all_seeds():
    """All seeds gain the same on each question: their means agree exactly, and only the questions are uncertain."""
    row = [1.0, -1.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.5]
    found, degrees = seed_variance(contributions([row] * 3, shared=True))
    assert found == pytest.approx(stats.sem(row) ** 2)
    assert degrees == pytest.approx(len(row) - 1)
    assert seed_variance(contributions([row] * 3))[0] == pytest.approx(0), "the fault: other questions that just agree"


# What must not matter


def test_order_of_seeds_and_questions_does_not_matter():
    rng = np.random.default_rng(1)
    gains = rng.normal(0.2, 1, size=(3, 10))
    found = contributions(gains.tolist(), shared=True)
    turned = {seed: dict(reversed(prompts.items())) for seed, prompts in reversed(found.items())}
    one, other = (difference_interval(each, bounded=False) for each in (found, turned))
    assert (one.low, one.high) == pytest.approx((other.low, other.high))
    swapped = difference_interval(
        {s: {p: -v for p, v in prompts.items()} for s, prompts in found.items()}, bounded=False
    )
    assert (swapped.low, swapped.high, swapped.p) == pytest.approx((-one.high, -one.low, one.p))


def test_seeds_that_agree_by_chance_do_not_narrow_the_interval_below_that_of_questions():
    found = contributions([[1, 1, 0, 0, 0, 0, 0, 0]] * 2)
    one, test = difference_interval(found, bounded=True), over_prompts(found, bounded=True)
    assert (one.low, one.high, one.p) == (test.low, test.high, test.p)


# One arm


PART, FAR = Part("niah", None, 128), Part("niah", None, 512)
MEASURE = Measure(name="both", suite="niah", task=None, parts=((0.5, PART), (0.5, FAR)))
NEAR = Measure(name="near", suite="niah", task=None, parts=((1.0, PART),))


def run(*by_part):
    return {
        part: {f"{number}{at}": Answer(f"{number}{at}", float(score)) for at, score in enumerate(scores)}
        for number, (part, scores) in enumerate(zip((PART, FAR), by_part, strict=False))
    }


def test_one_arm_with_one_seed_has_wilsons_interval():
    one = arm_interval({0: run([1] * 7 + [0] * 13)}, NEAR)
    wilson = stats.binomtest(7, 20).proportion_ci(0.95, "wilson")
    assert (one.value, one.low, one.high) == pytest.approx((0.35, wilson.low, wilson.high), abs=1e-4)


def test_lengths_are_fixed_so_their_squared_errors_add_up():
    one = arm_interval({0: run([1] * 10 + [0] * 10, [1] * 10 + [0] * 10)}, MEASURE)
    single = arm_interval({0: run([1] * 10 + [0] * 10)}, NEAR)
    assert one.high - one.value == pytest.approx((single.high - single.value) / math.sqrt(2))


def test_an_arm_that_never_succeeds_still_has_an_interval():
    one = arm_interval({seed: run([0] * 20) for seed in range(3)}, NEAR)
    assert (one.value, one.low) == (0, 0) and one.high > 0.1, "the three seeds share their 20 questions"


def test_a_seed_without_one_of_the_lengths_does_not_count():
    one = arm_interval({0: run([1, 0], [0, 0]), 1: run([1, 1])}, MEASURE)
    assert (one.seeds, one.value) == (1, pytest.approx(0.25))
    assert arm_interval({0: run([1])}, MEASURE) is None


# Coverage


def rates(scenario, trials=250):
    return {name: share for name, (share, _) in coverage.coverage(scenario, trials).items()}


@pytest.mark.parametrize("shared", [False, True])
def test_the_interval_holds_the_truth_where_a_bootstrap_and_questions_alone_do_not(shared):
    """Fixed seed, 250 studies; tools/interval_coverage.py has 2,000 for each of 14 scenarios."""
    found = rates(coverage.Scenario(name="", seeds=3, questions=50, spread=0.8, shared=shared))
    assert found["two-level"] >= 0.93
    assert found["bootstrap"] < 0.90 and found["questions"] < 0.65, "both variants must be caught by this"


def test_without_a_spread_over_seeds_the_interval_is_not_much_too_wide():
    scenario = coverage.Scenario(name="", seeds=3, questions=50, spread=0.0)
    found = coverage.coverage(scenario, 100)
    assert found["two-level"][0] >= 0.95
    assert found["two-level"][1] < 0.9 * found["t"][1], "Student's t with the floor is wider than necessary"


def test_the_true_difference_of_a_scenario_is_the_mean_over_many_studies():
    scenario = coverage.Scenario(name="", seeds=3, questions=200, spread=0.5, failing=0.1)
    rng = np.random.default_rng(0)
    means = [coverage.trial(scenario, rng).mean() for _ in range(600)]
    assert fmean(means) == pytest.approx(coverage.true_difference(scenario), abs=4 * float(stats.sem(means)))
