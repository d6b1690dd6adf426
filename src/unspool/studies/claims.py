"""Claims of papers, compared with results: shown, not shown, contradicted, or not run.

A file lists the claims: two arms, metrics, and which arm the paper found better. A verdict needs the 95% interval of
the difference (`two_level.py`) and a p-value below 0.05 after Holm's correction: over the comparisons that were planned
together, or else over all other claims of the paper. With fewer seeds or questions than the file's rule it is
exploratory.
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


class Family(Config):
    """Comparisons that were planned together; their p-values are corrected together, whatever the claims."""

    folder: str = Field(description="Folder of results below docs/results.")
    metric: str = Field(description="The measure of all of them.")
    pairs: list[tuple[str, str]] = Field(min_length=1, description="Pairs of arms, by their names in the folder.")


class Claims(Config):
    rule: Rule = Field(description="What a result needs to be more than exploratory.")
    data: list[Results] = Field(description="The first folder that has both arms and the metric counts.")
    families: list[Family] = Field([], description="Comparisons that were planned together.")
    claims: list[Claim] = Field(description="The claims, paper by paper.")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim on one metric."""

    claim: Claim
    metric: str
    folder: str = ""
    pair: frozenset[str] = frozenset()  # arms, by their names in the folder
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
    planned = _planned(claims, results)
    judged = []
    for paper in dict.fromkeys(claim.paper for claim in claims.claims):
        mine = [one for one in found if one.claim.paper == paper]
        own = [planned.get((one.folder, one.metric, one.pair)) for one in mine]
        others = [
            None if p is not None or one.interval is None else one.interval.p for one, p in zip(mine, own, strict=True)
        ]
        for one, p, other in zip(mine, own, holm(others), strict=True):
            judged.append(_verdict(replace(one, p=other if p is None else p), claims.rule))
    return judged


def _planned(claims: Claims, results: Mapping[str, ByArm]) -> dict[tuple[str, str, frozenset[str]], float | None]:
    """Return the corrected p-value of each planned comparison, by folder, metric and pair of arms."""
    found: dict[tuple[str, str, frozenset[str]], float | None] = {}
    for family in claims.families:
        arms = results.get(family.folder, {})
        ps = []
        for first, second in family.pairs:
            compared = _compare(arms.get(first), arms.get(second), family.metric)
            ps.append(None if compared is None else compared[1].p)
        for pair, p in zip(family.pairs, holm(ps), strict=True):
            found[family.folder, family.metric, frozenset(pair)] = p
    return found


def _measure(claims: Claims, claim: Claim, metric: str, results: Mapping[str, ByArm]) -> Finding:
    for data in claims.data:
        arms = results[data.folder]
        first, second = (data.arms.get(name, name) for name in (claim.first, claim.second))
        compared = _compare(arms.get(first), arms.get(second), metric)
        if compared is not None:
            measure, interval, questions = compared
            return Finding(
                claim=claim,
                metric=metric,
                folder=data.folder,
                pair=frozenset((first, second)),
                measure=measure,
                interval=interval,
                questions=questions,
            )
    return Finding(claim=claim, metric=metric)


def _compare(
    first: Mapping[int, Answers] | None, second: Mapping[int, Answers] | None, metric: str
) -> tuple[Measure, Interval, int] | None:
    """Return measure, interval of the first arm minus the second, and fewest questions; None without common scores."""
    if first is None or second is None:
        return None
    measure = find_measure(metric, [part for run in [*first.values(), *second.values()] for part in run])
    if measure is None:
        return None
    contributions = contributions_of(dict(first), dict(second), measure)
    interval = difference_interval(contributions, bounded=measure.is_bounded)
    if interval is None:
        return None
    return measure, interval, min(_fewest(first[seed], second[seed], measure) for seed in contributions)


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
