"""Scores by question from committed answers, and measures by name, such as `niah/32K`."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from unspool.core.config import did_you_mean
from unspool.core.errors import ConfigError
from unspool.core.sizes import parse_size
from unspool.evals.suites import SUITES
from unspool.studies.arm_scores import Answer, Answers, Measure, Part, by_category, mean_of
from unspool.studies.raw_results import Sample

OLD_NAMES = {"loss": "perplexity"}  # suites by the names that older results have
UNBOUNDED = ("mrcr",)  # suites whose scores are not between 0 and 1
Where = Mapping[str, Sequence[Any]]  # field of a sample: its allowed values


def answers_of(samples: Sequence[Sample], where: Where | None = None) -> Answers:
    """Return scores by task, length and question, of the samples whose fields have the values in `where`."""
    answers: Answers = {}
    ratios: dict[Part, dict[str, tuple[str, float, float]]] = {}
    for sample in samples:
        if any(sample.get(key) not in values for key, values in (where or {}).items()):
            continue
        suite = str(OLD_NAMES.get(sample["suite"], sample["suite"]))
        length, key = sample["length"], sample["hash"]
        prompt = f"{suite} {sample.get('context') or key}"
        part = Part(suite, sample.get("task"), length)
        if "losses" in sample:
            for bucket in sample["losses"]:
                if bucket["value"] is not None:
                    span = Part(suite, None, length, bucket["from"], bucket["to"])
                    answers.setdefault(span, {})[key] = Answer(prompt, bucket["value"])
        elif "losses_by_context" in sample:
            losses = sample["losses_by_context"]
            gained, possible = losses["query"] - losses["full"], losses["query"] - losses["oracle"]
            ratios.setdefault(part, {})[key] = (prompt, gained, possible)
        elif "key_tokens" in sample:
            tokens = sample["key_tokens"]
            ratios.setdefault(part, {})[key] = (prompt, (sample["score"] or 0.0) * tokens, tokens)
        elif sample["score"] is not None:
            answers.setdefault(part, {})[key] = Answer(prompt, sample["score"])
    return answers | {part: found for part, group in ratios.items() if (found := _linearized(group))}


def _linearized(group: Mapping[str, tuple[str, float, float]]) -> dict[str, Answer]:
    """Return one value per question whose mean is the ratio of two sums, and whose spread is the ratio's.

    The ratio R of sums is the value of LongPPL (loss per key token) and of MRCR (share of the possible gain). Its error
    is that of the mean of R + (a − R·b)/mean(b), to first order.
    """
    total = sum(below for _, _, below in group.values())
    if total <= 0:
        return {}
    ratio = sum(above for _, above, _ in group.values()) / total
    scale = len(group) / total
    return {
        key: Answer(prompt, ratio + (above - ratio * below) * scale) for key, (prompt, above, below) in group.items()
    }


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


def is_bounded(measure: Measure) -> bool:
    """Return whether single scores are between 0 and 1."""
    return not measure.is_loss and measure.suite not in UNBOUNDED
