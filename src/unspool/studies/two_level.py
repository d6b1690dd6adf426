"""Intervals in which both training seeds and questions are random: of one arm, and of the difference of two arms.

A mean over k seeds and n questions varies for two reasons: another seed trains another model, and other questions are
harder or easier. The interval is Student's t over seeds, and never narrower than the interval over questions:

    variance = S + C,   S = variance of the seeds' means / k,   C = mean covariance of two seeds, if positive

If each seed has its own questions, S contains both sources and C is 0. If seeds share questions, C is the part of the
error that they share. The degrees of freedom (Satterthwaite) are k − 1 if S dominates, and n − 1 if C does. Few seeds
can agree by chance; the interval over questions then bounds the width from below.

`tools/interval_coverage.py` compares this interval with a hierarchical bootstrap, which is too narrow for three seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, variance

import numpy as np

from unspool.core.stats import score_interval, standard_error, t_p_value, t_quantile, wilson
from unspool.studies.arm_comparison import difference, over_prompts
from unspool.studies.arm_scores import Answers, Contributions, Measure, Part


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its 95% interval. With one seed, the interval covers other questions only, not other seeds."""

    value: float
    low: float | None  # None: too few questions
    high: float | None
    p: float | None = None  # two-sided, for a difference
    seeds: int
    questions: int  # distinct prompts; questions on one context are one prompt


def seed_variance(contributions: Contributions) -> tuple[float, float]:
    """Return the variance of the mean over seeds and its degrees of freedom, for at least two seeds.

    `contributions` has each prompt's part of a seed's value, by seed.
    """
    k = len(contributions)
    between = variance(sum(prompts.values()) for prompts in contributions.values()) / k
    shared, num_shared = _mean_covariance(contributions)
    total = between + shared
    if not total:
        return 0.0, k - 1.0
    return total, total**2 / (between**2 / (k - 1) + (shared**2 / (num_shared - 1) if shared else 0.0))


def _mean_covariance(contributions: Contributions) -> tuple[float, int]:
    """Return the mean covariance of two seeds' values, at least 0, and the smallest number of shared prompts."""
    found = []
    fewest = 0
    for first, second in combinations(contributions.values(), 2):
        prompts = sorted(first.keys() & second.keys())
        m = len(prompts)
        if m < 2:
            found.append(0.0)
            continue
        fewest = min(fewest or m, m)
        pair = np.array([[first[prompt] for prompt in prompts], [second[prompt] for prompt in prompts]])
        # Each value is a sum over prompts, so the covariance of two values is m times that of one prompt's parts.
        found.append(m * float(np.cov(pair)[0, 1]))
    return max(0.0, fmean(found)), fewest


def difference_interval(contributions: Contributions, *, bounded: bool) -> Interval | None:
    """Return the mean difference of two arms over seeds and paired prompts; None without a common prompt.

    The p-value is the larger of Student's t over seeds and sign flips over prompts: a difference must exceed both
    sources of chance. `bounded`: scores are between 0 and 1.
    """
    value = difference(contributions)
    if value is None:
        return None
    prompts = over_prompts(contributions, bounded=bounded)
    low, high, p = prompts.low, prompts.high, prompts.p
    if len(contributions) > 1 and low is not None and high is not None and p is not None:
        error, degrees = seed_variance(contributions)
        half = t_quantile(degrees) * math.sqrt(error)
        limit = 1.0 if bounded else math.inf
        low, high = max(-limit, min(low, value - half)), min(limit, max(high, value + half))
        p = max(p, t_p_value(value / math.sqrt(error), degrees)) if error else p
    return Interval(value=value, low=low, high=high, p=p, seeds=len(contributions), questions=prompts.n)


def arm_interval(by_seed: Mapping[int, Answers], measure: Measure) -> Interval | None:
    """Return the mean of one arm over its seeds; None if no seed was measured."""
    found = {
        seed: parts_of(answers, measure)
        for seed, answers in sorted(by_seed.items())
        if all(answers.get(part) for _, part in measure.parts)
    }
    value = difference(found)
    if value is None:
        return None
    low, high = _over_questions([by_seed[seed] for seed in found], measure, value)
    if len(found) > 1 and low is not None and high is not None:
        error, degrees = seed_variance(found)
        half = t_quantile(degrees) * math.sqrt(error)
        low, high = min(low, value - half), max(high, value + half)
    if measure.is_bounded and low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    questions = len({prompt for prompts in found.values() for prompt in prompts})
    return Interval(value=value, low=low, high=high, seeds=len(found), questions=questions)


def parts_of(answers: Answers, measure: Measure) -> dict[str, float]:
    """Return each prompt's part of a measure of one run; the parts sum to the measure."""
    prompts: dict[str, float] = {}
    for weight, part in measure.parts:
        for answer in answers[part].values():
            prompts[answer.prompt] = prompts.get(answer.prompt, 0.0) + weight * answer.score / len(answers[part])
    return prompts


def _over_questions(runs: Sequence[Answers], measure: Measure, value: float) -> tuple[float | None, float | None]:
    """Return the interval over questions: tasks and lengths are fixed, so their squared distances add up."""
    below = above = 0.0
    for weight, part in measure.parts:
        low, mean, high = _part_interval(runs, part, bounded=measure.is_bounded)
        if low is None or high is None:
            return None, None
        below += (weight * (mean - low)) ** 2
        above += (weight * (high - mean)) ** 2
    return value - math.sqrt(below), value + math.sqrt(above)


def _part_interval(runs: Sequence[Answers], part: Part, *, bounded: bool) -> tuple[float | None, float, float | None]:
    """Return (low, mean, high) over prompts: Wilson's interval for right and wrong answers, Student's t for losses."""
    scores: dict[str, list[float]] = {}
    for answers in runs:
        for answer in answers[part].values():
            scores.setdefault(answer.prompt, []).append(answer.score)
    values = np.array([fmean(group) for group in scores.values()])
    mean = float(values.mean())
    if bounded and all(score in (0.0, 1.0) for group in scores.values() for score in group):
        low, high = wilson(float(values.sum()), len(values))
    elif bounded:
        low, high = score_interval(values.tolist())
    elif len(values) < 2:
        return None, mean, None
    else:
        half = t_quantile(len(values) - 1) * standard_error(values)[1]
        low, high = mean - half, mean + half
    return low, mean, high
