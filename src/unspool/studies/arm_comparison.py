"""Arms ranked and compared: means and deviations over seeds, paired differences with intervals and p-values.

In: a `Study`, the answers of its runs. Out: plain data, as study.json has it.
Promise: arms are compared on the same questions under the same seeds only; what was not measured is null and ranks
nowhere; p-values are corrected by Holm's method over all comparisons of a measure. A verdict is never more than the
sample gives: `better` and `worse` say of what (`seeds`: the recipes; `models`: these trained models), `equal` is within
the study's margin, and all else is "the sample is too small to tell".
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from unspool.core.stats import ALPHA
from unspool.studies.arm_scores import (
    Answers,
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
from unspool.studies.stats import could_tell, difference, holm, over_prompts, over_seeds

TOO_SMALL = "the sample is too small to tell"
ByArm = Mapping[str, dict[int, Answers]]
"""Arm: seed: its answers; what has not run is not there."""


def compare_arms(study: Study, answers: ByArm, *, context: int | None) -> dict[str, Any]:
    """`context`: the model's own, beyond which measures are long."""
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
    """Mean and deviation over seeds; None where nothing, or only one seed, was measured."""
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
        "prompts": vars(over_prompts(found, bounded=not measure.is_loss)).copy(),
        "seeds": vars(over_seeds(found, bounded=not measure.is_loss)).copy(),
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
    # Many tokens show differences that nobody would act on.
    by = f" by less than {size}" if small else ""
    if _shown(seeds["p_holm"]):
        return {"verdict": word, "of": "seeds", "says": f"{word}{by}, over {seeds['n']} seeds"}
    if _shown(prompts["p_holm"]):
        says = f"{word}{by} on these prompts; " + (
            f"{seeds['n']} seeds are too few to say so of the recipe" if seeds["n"] > 1 else "one seed only"
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
    """By score, then by loss; an arm that lacks one of them has no rank and comes last.

    Other seeds are other prompts, so that arms are ranked by the seeds that all of them have, if there are any.
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
    """The seeds that all of these arms were measured under."""
    found = [set(table["arms"][arm]["by_seed"]) for table in means for arm in arms]
    return sorted(set.intersection(*found), key=int) if found else []
