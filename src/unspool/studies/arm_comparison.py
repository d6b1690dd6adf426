"""Rank and compare the arms of a study: means over seeds, paired differences with intervals and p-values.

Arms are compared only on the same questions under the same seeds. Holm's method corrects p-values over all comparisons
of a measure. A verdict states what it applies to: the recipes (`seeds`) or these trained models (`models`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

import numpy as np

from unspool.core.stats import (
    ALPHA,
    agresti_min,
    agresti_min_interval,
    could_tell,
    sign_test,
    standard_error,
    t_p_value,
    t_quantile,
)
from unspool.studies.arm_scores import (
    Answers,
    Contributions,
    Measure,
    common_questions,
    contributions_of,
    count_of,
    mean_of,
    ranking,
    value_of,
)
from unspool.studies.load import Study
from unspool.studies.schema import Margin

# Up to this many differences, all 2^n sign flips are enumerated; above it, DRAWS flips are sampled.
MAX_EXACT = 14
DRAWS = 20_000
# Relative tolerance: differences closer than this are equal up to rounding.
TOLERANCE = 1e-9
TOO_SMALL = "the sample is too small to tell"
ByArm = Mapping[str, dict[int, Answers]]  # arm: seed: answers; runs without results are absent


def compare_arms(study: Study, answers: ByArm, *, context: int | None) -> dict[str, Any]:
    """Rank and compare the arms for study.json. `context` is the original context length of the model."""
    chosen = ranking(study.measures, study.compare, context)
    scores = [measure for measure in chosen if not measure.is_loss]
    losses = [measure for measure in chosen if measure.is_loss]
    means = [mean_of(name, group) for name, group in (("score", scores), ("loss", losses)) if group]
    judged = [*means, *study.measures]
    tables = {measure.name: _table(study, answers, measure) for measure in judged}
    overall = [tables[measure.name] for measure in means]
    return {
        "baseline": study.baseline,
        "ranked_by": {"score": [m.name for m in scores], "loss": [m.name for m in losses]},
        "margin": study.margin.model_dump(),
        "ranked_seeds": ranked_seeds(overall, _measured(study, overall)),
        "ranking": _rank(study, overall),
        "measures": list(tables.values()),
    }


def _table(study: Study, answers: ByArm, measure: Measure) -> dict[str, Any]:
    pairs = [(arm, other) for arm in study.arms for other in study.against[arm]]
    compared = [_comparison(answers, measure, *pair) for pair in pairs]
    for name in ("prompts", "seeds"):
        for one, p in zip(compared, holm([one[name]["p"] for one in compared]), strict=True):
            one[name]["p_holm"] = p
    family = sum(one["prompts"]["p"] is not None for one in compared)
    for one in compared:
        one |= _verdict(one, measure, study.margin, family)
    return {
        "measure": measure.name,
        "kind": measure.kind,
        "higher_is_better": not measure.is_loss,
        "arms": {arm: _summary(answers.get(arm, {}), measure) for arm in study.arms},
        "comparisons": compared,
    }


def _summary(by_seed: Mapping[int, Answers], measure: Measure) -> dict[str, Any]:
    """Return mean and standard deviation over seeds; None if there are too few."""
    values = {seed: value for seed, answers in by_seed.items() if (value := value_of(answers, measure)) is not None}
    return {
        "mean": fmean(values.values()) if values else None,
        "deviation": stdev(values.values()) if len(values) > 1 else None,
        "n": sum(count_of(by_seed[seed], measure) for seed in values),
        "by_seed": {str(seed): value for seed, value in sorted(values.items())},
    }


def _comparison(answers: ByArm, measure: Measure, arm: str, other: str) -> dict[str, Any]:
    first, second = answers.get(arm, {}), answers.get(other, {})
    found = contributions_of(first, second, measure)
    return {
        "arm": arm,
        "against": other,
        "common_seeds": list(found),
        "n": common_questions(first, second, measure, list(found)),
        "difference": difference(found),
        "prompts": vars(over_prompts(found, bounded=measure.is_bounded)).copy(),
        "seeds": vars(over_seeds(found, bounded=measure.is_bounded)).copy(),
    }


def _verdict(one: Mapping[str, Any], measure: Measure, margin: Margin, family: int) -> dict[str, Any]:
    gap, prompts, seeds = one["difference"], one["prompts"], one["seeds"]
    if gap is None:
        return {"verdict": "not measured", "of": None, "says": "not measured"}
    word = "better" if (gap > 0) != measure.is_loss else "worse"
    widest = seeds if seeds["low"] is not None else prompts
    bound = getattr(margin, measure.kind)
    small = widest["low"] is not None and -bound <= widest["low"] and widest["high"] <= bound
    size = f"{100 * bound:g} points" if not measure.is_loss else f"{bound:g} nats"
    # With many tokens, even irrelevant differences are significant.
    by = f" by less than {size}" if small else ""
    if _shown(seeds["p_holm"]):
        return {"verdict": word, "of": "seeds", "says": f"{word}{by}, over {seeds['n']} seeds"}
    if _shown(prompts["p_holm"]):
        says = f"{word}{by} on these prompts; " + (
            f"{seeds['n']} seeds are too few to conclude this for the recipe" if seeds["n"] > 1 else "one seed only"
        )
        return {"verdict": word, "of": "models", "says": says}
    if small:
        return {"verdict": "equal", "of": "seeds" if seeds["n"] > 1 else "models", "says": f"equal within {size}"}
    says = TOO_SMALL
    if not could_tell(prompts["n"], family):
        says += f" (n = {prompts['n']} could show nothing)"
    return {"verdict": "too small to tell", "of": None, "says": says}


def _shown(p: float | None) -> bool:
    return p is not None and p < ALPHA


def _rank(study: Study, means: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank by score, then by loss; an arm that lacks one of them has no rank and is last.

    Other seeds use other prompts, so arms are ranked on the seeds that all of them have, if there are any.
    """
    whole = _measured(study, means)
    common = ranked_seeds(means, whole)

    def key(arm: str) -> tuple[float, ...]:
        entries = [(-1.0 if table["higher_is_better"] else 1.0, table["arms"][arm]) for table in means]
        return tuple(
            sign * (fmean(entry["by_seed"][seed] for seed in common) if common else entry["mean"])
            for sign, entry in entries
        )

    ordered = sorted(whole, key=key)
    entries = []
    for arm in [*ordered, *(arm for arm in study.arms if arm not in whole)]:
        # Equal arms share a rank.
        rank = 1 + sum(key(other) < key(arm) for other in ordered) if arm in whole else None
        against = [
            {"measure": table["measure"], **one} for table in means for one in table["comparisons"] if one["arm"] == arm
        ]
        values = {table["measure"]: table["arms"][arm] for table in means}
        entries.append({"rank": rank, "arm": arm, **values, "comparisons": against})
    return entries


def _measured(study: Study, means: Sequence[dict[str, Any]]) -> list[str]:
    return [arm for arm in study.arms if all(table["arms"][arm]["mean"] is not None for table in means)]


def ranked_seeds(means: Sequence[dict[str, Any]], arms: Sequence[str]) -> list[str]:
    """Return the seeds that all of these arms were measured with."""
    found = [set(table["arms"][arm]["by_seed"]) for table in means for arm in arms]
    return sorted(set.intersection(*found), key=int) if found else []


# From paired differences to p-values and intervals.


@dataclass(frozen=True, kw_only=True)
class Test:
    """A test over `n` units with its 95% interval; None if there are too few units."""

    n: int
    p: float | None
    low: float | None
    high: float | None


def pooled(contributions: Contributions) -> dict[str, float]:
    """Average over seeds, prompt by prompt; a prompt with answers from several seeds counts once."""
    whole: dict[str, float] = {}
    for prompts in contributions.values():
        for prompt, value in prompts.items():
            whole[prompt] = whole.get(prompt, 0.0) + value / len(contributions)
    return whole


def difference(contributions: Contributions) -> float | None:
    """Return the mean difference over seeds."""
    return fmean(sum(prompts.values()) for prompts in contributions.values()) if contributions else None


def over_prompts(contributions: Contributions, *, bounded: bool) -> Test:
    """Test whether these trained models would differ on other prompts, by flipping the signs of whole prompts.

    Questions on one context are one prompt, and so are the answers of several seeds to it. The p-value is exact for few
    prompts, and never below 2^(1−n). `bounded`: single differences are between −1 and 1, as for scores.
    """
    values = np.array(list(pooled(contributions).values()))
    n = len(values)
    if n == 0:
        return Test(n=0, p=None, low=None, high=None)
    # Contributions sum to the difference; times n, their mean is the difference.
    low, high = _interval(values * n, bounded=bounded)
    return Test(n=n, p=flip_p(values), low=low, high=high)


def flip_p(values: np.ndarray) -> float:
    """Return the share of sign flips whose sum is at least as far from 0; a sign test if all sizes are equal."""
    sizes = np.abs(values[np.abs(values) > TOLERANCE * max(1e-300, float(np.abs(values).max(initial=0)))])
    signed = float(values.sum())
    n = len(sizes)
    if n == 0:
        return 1.0
    if np.ptp(sizes) <= TOLERANCE * sizes.max():
        return sign_test(round(signed / float(sizes.mean())), n)
    wanted = abs(signed) - TOLERANCE * float(sizes.sum())
    if n <= MAX_EXACT:
        return float(np.mean(np.abs(_flips(n) @ sizes) >= wanted))
    rng = np.random.default_rng(n)
    beyond = 0
    for _ in range(10):
        signs = rng.integers(2, size=(DRAWS // 10, n)) * 2 - 1
        beyond += int((np.abs(signs @ sizes) >= wanted).sum())
    # The observed signs are one of the flips.
    return (beyond + 1) / (DRAWS + 1)


@cache
def _flips(n: int) -> np.ndarray:
    return 1 - 2 * ((np.arange(1 << n)[:, None] >> np.arange(n)) & 1).astype(np.int8)


def _interval(values: np.ndarray, *, bounded: bool) -> tuple[float | None, float | None]:
    if len(values) < 2:
        return None, None
    quantile = t_quantile(len(values) - 1)
    if bounded:
        return agresti_min_interval(values, quantile)
    mean, error = standard_error(values)
    return mean - quantile * error, mean + quantile * error


def over_seeds(contributions: Contributions, *, bounded: bool = False) -> Test:
    """Test whether the recipes would differ under other seeds, by Student's t; one seed gives no p-value.

    The spread over prompts is a lower bound of the error. Without it, two seeds that agree by chance would prove
    anything.
    """
    means = [sum(prompts.values()) for prompts in contributions.values()]
    k = len(means)
    if k < 2:
        return Test(n=k, p=None, low=None, high=None)
    prompts = np.array(list(pooled(contributions).values()))
    _, noise = (agresti_min if bounded else standard_error)(prompts * len(prompts))
    error = max(stdev(means) / math.sqrt(k), noise)
    mean = fmean(means)
    if error <= TOLERANCE * abs(mean):
        return Test(n=k, p=None, low=None, high=None)
    half = t_quantile(k - 1) * error
    return Test(n=k, p=t_p_value(mean / error, k - 1), low=mean - half, high=mean + half)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Correct p-values by Holm's method: the smallest of m is multiplied by m, the next by m − 1, …; None stays."""
    known = sorted((p, at) for at, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    so_far = 0.0
    for rank, (p, at) in enumerate(known):
        so_far = max(so_far, min(1.0, (len(known) - rank) * p))
        corrected[at] = so_far
    return corrected
