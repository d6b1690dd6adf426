"""Claims of papers, compared with results: shown, not shown, contradicted, or not run.

A file lists the claims: two arms, metrics, and which arm the paper found better. A verdict needs the 95% interval of
the difference (`two_level.py`) and a p-value below 0.05 after Holm's correction over the claims of a paper. With fewer
seeds or questions than the file's rule it is exploratory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from unspool.core.config import Config
from unspool.core.errors import ConfigError
from unspool.core.stats import ALPHA
from unspool.studies.arm_comparison import holm
from unspool.studies.arm_scores import Answers, Measure, contributions_of
from unspool.studies.raw_scores import find_measure
from unspool.studies.schema import Margin
from unspool.studies.two_level import Interval, difference_interval

MARGIN = Margin.model_validate({})
ByArm = Mapping[str, Mapping[int, Answers]]  # arm: seed: answers


class Rule(Config):
    """What a result needs to be more than exploratory."""

    seeds: int = Field(ge=1, description="Training seeds of both arms.")
    questions: int = Field(ge=1, description="Questions per seed and length.")


class Claim(Config):
    paper: str = Field(description="Name of the paper.")
    claim: str = Field(description="The statement, in one sentence.")
    source: str = Field(description="Section, table or figure.")
    theirs: str = Field(description="The paper's numbers, at its scale.")
    first: str = Field(description="Arm of the claim.")
    second: str = Field(description="Arm that it is compared with.")
    expect: Literal["higher", "lower", "no higher", "no lower"] = Field(
        description="Value of the first arm in comparison with the second. `no higher`: higher by less than the margin."
    )
    metrics: list[str] = Field(min_length=1, description="Measures such as ruler/32K, each with a finding of its own.")


class Results(Config):
    """A folder of results, and its arms by the names in the claims; other arms keep their names."""

    folder: str = Field(description="Folder of results below docs/results.")
    arms: dict[str, str] = Field({}, description="Name in the claims: name in the folder.")
    where: dict[str, dict[str, Any]] = Field({}, description="Suite: fields of the questions that count.")


class Claims(Config):
    rule: Rule = Field(description="What a result needs to be more than exploratory.")
    data: list[Results] = Field(description="The first folder that has both arms and the metric counts.")
    claims: list[Claim] = Field(description="The claims, paper by paper.")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim on one metric."""

    claim: Claim
    metric: str
    measure: Measure | None = None  # None: not run
    interval: Interval | None = None  # of the first arm minus the second
    questions: int = 0  # fewest of a seed and length
    p: float | None = None  # after Holm's correction
    verdict: Literal["shown", "not shown", "contradicted", "not run"] = "not run"
    exploratory: bool = False


def read_claims(path: Path) -> Claims:
    try:
        return Claims.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None


def judge(claims: Claims, results: Mapping[str, ByArm]) -> list[Finding]:
    """Return a finding for each claim and metric. `results` has the arms of each folder, by the folder's own names."""
    found = [_measure(claims, claim, metric, results) for claim in claims.claims for metric in claim.metrics]
    judged = []
    for paper in dict.fromkeys(claim.paper for claim in claims.claims):
        mine = [one for one in found if one.claim.paper == paper]
        corrected = holm([None if one.interval is None else one.interval.p for one in mine])
        judged += [_verdict(replace(one, p=p), claims.rule) for one, p in zip(mine, corrected, strict=True)]
    return judged


def _measure(claims: Claims, claim: Claim, metric: str, results: Mapping[str, ByArm]) -> Finding:
    for data in claims.data:
        arms = results[data.folder]
        first, second = (arms.get(data.arms.get(name, name)) for name in (claim.first, claim.second))
        if first is None or second is None:
            continue
        measure = find_measure(metric, [part for run in [*first.values(), *second.values()] for part in run])
        if measure is None:
            continue
        contributions = contributions_of(dict(first), dict(second), measure)
        interval = difference_interval(contributions, bounded=measure.is_bounded)
        if interval is not None:
            questions = min(_fewest(first[seed], second[seed], measure) for seed in contributions)
            return Finding(claim=claim, metric=metric, measure=measure, interval=interval, questions=questions)
    return Finding(claim=claim, metric=metric)


def _fewest(first: Answers, second: Answers, measure: Measure) -> int:
    """Return the number of common questions at the length with the fewest of them."""
    counts: dict[tuple[int, int | None], int] = {}
    for _, part in measure.parts:
        key = part.length, part.start
        counts[key] = counts.get(key, 0) + len(first[part].keys() & second[part].keys())
    return min(counts.values())


def _verdict(one: Finding, rule: Rule) -> Finding:
    if one.interval is None or one.measure is None:
        return one
    interval, expect = one.interval, one.claim.expect
    exploratory = interval.seeds < rule.seeds or one.questions < rule.questions
    if interval.low is None or interval.high is None:
        return replace(one, verdict="not shown", exploratory=exploratory)
    low, high = interval.low, interval.high
    if expect.endswith("lower"):
        low, high = -high, -low
    significant = one.p is not None and one.p < ALPHA
    if expect.startswith("no "):
        shown, contradicted = high < getattr(MARGIN, one.measure.kind), low > 0 and significant
    else:
        shown, contradicted = low > 0 and significant, high < 0 and significant
    verdict: Literal["shown", "not shown", "contradicted"] = (
        "shown" if shown else "contradicted" if contradicted else "not shown"
    )
    return replace(one, verdict=verdict, exploratory=exploratory)
