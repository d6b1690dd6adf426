"""Significance against hand-worked cases, plain enumeration and simulation; the usual mistakes must show."""

import itertools
import math

import numpy as np
import pytest

from unspool.core.stats import ALPHA, could_tell, sign_test, t_p_value
from unspool.studies.arm_comparison import (
    difference,
    flip_p,
    holm,
    over_prompts,
    over_seeds,
    pooled,
)


def as_contributions(values, seed=0):
    """One seed; each value is the difference on one prompt."""
    return {seed: {f"{seed}-{at}": float(value) / len(values) for at, value in enumerate(values)}}


def brute_force_p(values):
    """Every flip, in plain Python."""
    seen = abs(sum(values))
    sums = [abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(values))]  # fmt: skip
    return sum(total >= seen - 1e-9 for total in sums) / len(sums)


# Student's t


@pytest.mark.parametrize(("seeds", "printed"), [(2, 12.706), (3, 4.303), (4, 3.182), (6, 2.571), (11, 2.228)])
def test_intervals_over_seeds_use_the_quantiles_of_printed_tables(seeds, printed):
    values = np.linspace(1, 2, seeds)
    found = over_seeds({seed: {"one prompt": value} for seed, value in enumerate(values)})
    assert found.high - found.low == pytest.approx(2 * printed * values.std(ddof=1) / math.sqrt(seeds), rel=3e-4)


# Over prompts


@pytest.mark.parametrize(("wins", "losses", "wanted"), [(4, 0, 0.125), (5, 0, 0.0625), (9, 1, 22 / 1024), (3, 3, 1.0)])
def test_right_and_wrong_answers_give_the_sign_test(wins, losses, wanted):
    values = [1] * wins + [-1] * losses + [0] * 7
    assert over_prompts(as_contributions(values), bounded=True).p == pytest.approx(wanted)
    assert sign_test(wins - losses, wins + losses) == pytest.approx(wanted)


def test_graded_differences_are_flipped_in_every_way():
    rng = np.random.default_rng(0)
    for size in (1, 2, 5, 9):
        values = rng.normal(0.4, 1, size=size).tolist()
        assert flip_p(np.array(values)) == pytest.approx(brute_force_p(values))


def test_many_differences_are_flipped_at_random_and_agree_with_all_flips(monkeypatch):
    values = np.random.default_rng(1).normal(0.35, 1, size=12)
    exact = flip_p(values)
    monkeypatch.setattr("unspool.studies.arm_comparison.MAX_EXACT", 5)
    assert flip_p(values) == pytest.approx(exact, abs=0.02)
    assert flip_p(values) == flip_p(values), "the same numbers must give the same p-value"


def test_no_difference_is_no_evidence():
    test = over_prompts(as_contributions([0] * 20), bounded=True)
    assert test.p == 1.0
    assert test.low < -0.05 < 0.05 < test.high, "20 equal answers do not prove equality"
    assert over_prompts({}, bounded=True).p is None


def test_pairs_tell_what_lonely_means_cannot():
    """Windows differ by far more than arms do: compared window by window the arm is ahead every time."""
    rng = np.random.default_rng(2)
    before = rng.normal(3, 0.5, size=12)
    after = before - 0.01 + rng.normal(0, 0.003, size=12)

    assert over_prompts(as_contributions(after - before), bounded=False).p < 0.01
    gap = abs(after.mean() - before.mean())
    unpaired = gap / math.sqrt(after.var(ddof=1) / 12 + before.var(ddof=1) / 12)
    assert t_p_value(unpaired, 22) > 0.5, "the broken variant sees nothing"


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(3)
    inside = {True: 0, False: 0}
    for _ in range(400):
        scores = rng.choice([-1, 0, 1], p=[0.1, 0.65, 0.25], size=20)
        test = over_prompts(as_contributions(scores), bounded=True)
        inside[True] += test.low <= 0.15 <= test.high
        test = over_prompts(as_contributions(rng.normal(0.15, 1, size=6)), bounded=False)
        inside[False] += test.low <= 0.15 <= test.high
    assert all(0.92 <= count / 400 <= 0.99 for count in inside.values()), inside


# Seeds


def test_a_prompt_that_several_seeds_answered_is_one_prompt():
    once = {0: {"a": 0.2, "b": -0.1}}
    again = {0: {"a": 0.2, "b": -0.1}, 1: {"a": 0.2, "b": -0.1}}

    assert pooled(again) == pytest.approx(once[0])
    assert over_prompts(again, bounded=True) == over_prompts(once, bounded=True)
    assert difference(again) == pytest.approx(difference(once))


def test_one_seed_says_nothing_about_others():
    assert over_seeds(as_contributions([1, 1, 1, 0])).p is None


def test_seeds_are_judged_by_students_t():
    """By hand: differences 0.2, 0.3, 0.4 over seeds; t = 0.3 / (0.1 / √3) = 5.196 with 2 degrees of freedom."""
    found = {seed: {f"{seed}": value} for seed, value in enumerate((0.2, 0.3, 0.4))}
    test = over_seeds(found)
    assert test.p == pytest.approx(0.0351, abs=2e-4)
    assert (test.low, test.high) == pytest.approx((0.3 - 4.3027 * 0.057735, 0.3 + 4.3027 * 0.057735), abs=1e-4)


def test_two_seeds_that_agree_by_chance_prove_nothing():
    found = as_contributions([1, 1, 0, 0, 0, 0, 0, 0], seed=0) | as_contributions([1, 1, 0, 0, 0, 0, 0, 0], seed=1)
    assert over_seeds(found).p > ALPHA


# Under no difference


def simulated(trials, *, seeds, prompts, seed_spread, shared=False, rng_seed=0):
    """Differences of two recipes that are equal on average over seeds: normal over prompts, and over seeds."""
    rng = np.random.default_rng(rng_seed)
    for _ in range(trials):
        common = rng.normal(size=prompts)
        yield {
            seed: {
                str(at) if shared else f"{seed}-{at}": float(value) / prompts
                for at, value in enumerate(
                    rng.normal(0, seed_spread) + (common if shared else rng.normal(size=prompts))
                )
            }
            for seed in range(seeds)
        }


def rate(found, p_of):
    return float(np.mean([p_of(one) < ALPHA for one in found]))


def by_prompts(found):
    return over_prompts(found, bounded=False).p


def as_if_independent(found):
    """The mistake: every answer of every seed counts as a separate prompt."""
    return flip_p(np.array([value for prompts in found.values() for value in prompts.values()]))


def test_equal_models_differ_in_one_study_of_twenty():
    found = list(simulated(600, seeds=1, prompts=10, seed_spread=0))
    assert 0.03 <= rate(found, by_prompts) <= 0.07


def test_equal_recipes_with_differing_seeds_are_rarely_distinguished_but_counting_answers_would():
    found = list(simulated(400, seeds=3, prompts=4, seed_spread=1.0))
    assert rate(found, lambda one: over_seeds(one).p) <= 0.075
    assert rate(found, as_if_independent) > 0.2, "the broken variant must be caught by this"


def test_prompts_of_every_seed_do_not_count_twice():
    found = list(simulated(300, seeds=2, prompts=7, seed_spread=0, shared=True))
    assert 0.02 <= rate(found, by_prompts) <= 0.08
    assert rate(found, as_if_independent) > 0.1, "the broken variant must be caught by this"


def test_a_real_difference_is_found_with_enough_seeds():
    real = [
        {seed: {prompt: value + 0.8 / 20 for prompt, value in prompts.items()} for seed, prompts in one.items()}
        for one in simulated(100, seeds=5, prompts=20, seed_spread=0.3)
    ]
    assert rate(real, lambda one: over_seeds(one).p) > 0.8


# Holm


def test_holms_correction_by_hand():
    """Sorted 0.01, 0.02, 0.04 × 3, 2, 1 = 0.03, 0.04, 0.04; never below the one before."""
    assert holm([0.04, 0.01, None, 0.02]) == pytest.approx([0.04, 0.03, None, 0.04])
    assert holm([0.03, 0.04]) == pytest.approx([0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_some_samples_could_never_tell():
    assert not could_tell(5, 1)
    assert could_tell(6, 1)
    assert not could_tell(6, 7)
