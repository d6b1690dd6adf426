"""Scores by question from committed answers, and measures by name, such as `niah/32K`."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size
from unspool.evals.suites import SUITES
from unspool.studies.arm_scores import Answers, Measure, Part, answers_of, by_category, mean_of
from unspool.studies.raw_results import Sample

OLD_NAMES = {"loss": "perplexity"}  # suites by the names that older results have
Where = Mapping[str, Any]  # field of a sample: its value, a list of values, or a range {from: …, to: …}


def select_answers(samples: Iterable[Sample], where: Where | None = None) -> Answers:
    """Return scores by task, length and question, of the samples whose fields have the values in `where`."""
    chosen = [
        sample | {"suite": OLD_NAMES.get(sample["suite"], sample["suite"])}
        for sample in samples
        if "hash" in sample and all(_matches(sample.get(key), wanted) for key, wanted in (where or {}).items())
    ]
    return answers_of(chosen, lambda sample: str(sample.get("context") or sample["hash"]))


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return value is not None and bool(wanted["from"] <= value <= wanted["to"])
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def find_measure(name: str, known: Iterable[Part]) -> Measure | None:
    """Return a measure by name, from the parts that were measured; None if there are none.

    Names are `niah/32K`, `ruler/32K` (mean of its tasks), `ruler/niah_*/32K`, `helmet/rag/32K`, `perplexity/16K-32K`;
    names joined by ` + ` are averaged.
    """
    parts = sorted(set(known), key=str)
    found = [_one_measure(one.strip(), parts) for one in name.split("+")]
    measures = [one for one in found if one is not None]
    return mean_of(name, measures) if len(measures) == len(found) else None


def _one_measure(name: str, known: Sequence[Part]) -> Measure | None:
    try:
        suite, *task, where = name.split("/")
        start, _, stop = where.rpartition("-")
        first, length = 0 if start in ("", "0") else parse_size(start), parse_size(stop)
    except ValueError:
        raise ConfigError(
            f"measure {name}: use SUITE/LENGTH, SUITE/TASK/LENGTH or SUITE/FROM-TO, such as niah/32K."
        ) from None
    if suite not in SUITES:
        raise ConfigError(f"measure {name}: no suite is called {suite!r}{did_you_mean(suite, SUITES)}")
    mine = [part for part in known if part.suite == suite]
    if start:
        return _span(name, first, length, mine)
    tasks = [
        Measure(name=f"{suite}/{part.task}", suite=suite, task=part.task, parts=((1.0, part),))
        for part in mine
        if part.length == length and part.start is None
    ]
    named = all(one.task for one in tasks)
    groups = by_category(SUITES[suite], tasks, length) if named else tasks
    chosen = (
        [one for one in dict.fromkeys([*groups, *tasks]) if fnmatchcase(str(one.task), task[0])] if task else groups
    )
    return mean_of(name, chosen) if chosen else None


def _span(name: str, start: int, stop: int, known: Sequence[Part]) -> Measure | None:
    """Return the loss between two positions, the mean over tokens."""
    parts = [part for part in known if part.start is not None and start <= part.start and (part.stop or 0) <= stop]
    # The first token of a window is not predicted.
    tokens = [(part.stop or 0) - max(1, part.start or 0) for part in parts]
    weights = tuple((count / sum(tokens), part) for count, part in zip(tokens, parts, strict=True))
    return Measure(name=name, suite=parts[0].suite, task=None, parts=weights) if parts else None
