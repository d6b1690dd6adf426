"""The measures of a study and the answers of its runs.

Measures have names before anything runs: `niah/32K`, `ruler/32K` (the mean of its tasks), `ruler/vt/32K`,
`perplexity/16K-32K`; in suites with categories also `helmet/rag/32K`. Each is a weighted mean of `Part`s.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unspool.core.artifacts import read_manifest
from unspool.core.config import did_you_mean
from unspool.core.errors import DataError
from unspool.core.sizes import format_size
from unspool.evals.config import EvalConfig
from unspool.evals.run import PROMPTS, SAMPLES
from unspool.evals.suite import Suite
from unspool.evals.suites import SUITES, suite_of
from unspool.evals.task_suite import TaskSuite
from unspool.models.loss import bucket_edges
from unspool.recipe.schema import Recipe
from unspool.recipe.yaml_lines import Problem

Contributions = Mapping[int, Mapping[str, float]]  # by seed and prompt: the prompt's part of the difference of two arms


class Part(NamedTuple):
    """One task at one length, or one range of positions."""

    suite: str
    task: str | None
    length: int
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measure:
    name: str
    suite: str
    task: str | None
    parts: tuple[tuple[float, Part], ...]  # with weights that sum to 1

    @property
    def is_loss(self) -> bool:
        return SUITES[self.suite].measure == "loss"

    @property
    def is_bounded(self) -> bool:
        """Return whether single scores are between 0 and 1."""
        return all(SUITES[part.suite].is_bounded for _, part in self.parts)

    @property
    def kind(self) -> Literal["score", "loss"]:
        return "loss" if self.is_loss else "score"

    @property
    def length(self) -> int:
        return max(part.length for _, part in self.parts)

    @property
    def lookups(self) -> set[str]:
        """Return the names that `compare` accepts: the full name, suite and task, or the suite for a whole suite."""
        return {self.name, f"{self.suite}/{self.task}"} if self.task else {self.name, self.suite}

    def is_beyond(self, context: int) -> bool:
        """Return whether it measures beyond this context length."""
        if SUITES[self.suite].by_position:
            return all((part.start or 0) >= context for _, part in self.parts)
        return self.length > context


def measures_of(recipes: Sequence[Recipe]) -> list[Measure]:
    """Return all measures of the evals of these recipes, without duplicates."""
    found: dict[str, Measure] = {}
    for recipe in recipes:
        for entry in recipe.evals:
            for measure in _of_eval(entry):
                found.setdefault(measure.name, measure)
    return list(found.values())


def _of_eval(entry: EvalConfig) -> Iterator[Measure]:
    suite = suite_of(entry)
    for length in sorted(filter(None, suite.lengths(entry))):  # short tasks have no length, and no questions to pair
        name = f"{suite.name}/{format_size(length)}"
        tasks = [
            _measure(f"{suite.name}/{task.name}/{format_size(length)}", Part(suite.name, task.name, length))
            for task in suite.chosen_tasks(entry)
        ]
        if suite.by_position:
            for start, stop in pairwise(bucket_edges(length)):
                part = Part(suite.name, None, length, start, stop)
                yield _measure(f"{suite.name}/{format_size(start)}-{format_size(stop)}", part)
        elif tasks:
            groups = by_category(suite, tasks, length)
            yield mean_of(name, groups if isinstance(suite, TaskSuite) and suite.has_overall else tasks)
            yield from dict.fromkeys([*groups, *tasks])
        else:
            yield _measure(name, Part(suite.name, None, length))


def by_category(suite: Suite, tasks: Sequence[Measure], length: int) -> list[Measure]:
    """Average the suite's tasks by category; a task that is alone in its category, or in none, stays as it is."""
    categories = suite.categories if isinstance(suite, TaskSuite) else {}
    owner = {task: name for name, names in categories.items() for task in names}
    groups: dict[str, list[Measure]] = {}
    for measure in tasks:
        assert measure.task is not None
        groups.setdefault(owner.get(measure.task, measure.task), []).append(measure)
    return [
        replace(mean_of(f"{suite.name}/{name}/{format_size(length)}", group), task=name) if len(group) > 1 else group[0]
        for name, group in groups.items()
    ]


def _measure(name: str, part: Part) -> Measure:
    return Measure(name=name, suite=part.suite, task=part.task, parts=((1.0, part),))


def mean_of(name: str, measures: Sequence[Measure]) -> Measure:
    """Return the plain mean of several measures of one kind."""
    share = 1 / len(measures)
    parts = tuple((weight * share, part) for measure in measures for weight, part in measure.parts)
    return Measure(name=name, suite=measures[0].suite, task=None, parts=parts)


def find_measures(pattern: str, measures: Sequence[Measure]) -> list[Measure]:
    """Find the measures for a name in `compare`; `*` matches any text."""
    if "*" in pattern:
        return [measure for measure in measures if fnmatchcase(measure.name, pattern)]
    return [measure for measure in measures if pattern in measure.lookups]


def compare_problems(data: Mapping[str, Any], measures: Sequence[Measure]) -> Iterator[Problem]:
    if not measures:
        yield Problem(place=("recipe",), text="has no evals, so its arms cannot be compared; add evals to the recipe.")
    known = sorted(set().union(*(measure.lookups for measure in measures)))
    for at, name in enumerate(data.get("compare") or []):
        if not find_measures(name, measures):
            text = f"{name!r} is not measured by the recipe's evals{did_you_mean(name, known)} Measured: "
            text += f"{', '.join(known)}."
            yield Problem(place=("compare", at), text=text)


def chosen_names(data: Mapping[str, Any], measures: Sequence[Measure]) -> list[str] | None:
    wanted = data.get("compare")
    if not wanted:
        return None
    found = {measure.name for name in wanted for measure in find_measures(name, measures)}
    return [measure.name for measure in measures if measure.name in found] or None


def ranking(measures: Sequence[Measure], names: Sequence[str] | None, context: int | None) -> list[Measure]:
    """Return measures that rank the arms: those in `names`, else those beyond the context, else the longest."""
    if names is not None:
        return [measure for measure in measures if measure.name in names]
    whole = [measure for measure in measures if measure.task is None]
    beyond = [measure for measure in whole if context is not None and measure.is_beyond(context)]
    if beyond:
        return beyond
    last = {measure.suite: measure for measure in whole}
    return list(last.values())


class Answer(NamedTuple):
    prompt: str  # questions on one context share a prompt, because their errors are correlated
    score: float


Answers = dict[Part, dict[str, Answer]]  # by part and by the hash of the question


def read_answers(folder: Path) -> Answers | None:
    """Read the answers in a `scores` folder; None if it has none."""
    manifest = read_manifest(folder)
    if manifest is None or not (folder / SAMPLES).is_file():
        return None
    together = _per_context(manifest.get("settings", {}).get("evals", []))
    contexts = {line["hash"]: line["context"] for line in _lines(folder / PROMPTS)}
    samples = [sample for sample in _lines(folder / SAMPLES) if "hash" in sample]  # short tasks have no questions
    firsts: dict[tuple[Any, ...], str] = {}
    for sample in samples:
        group = _group(sample, together)
        firsts[group] = min(firsts.get(group, sample["hash"]), sample["hash"])
    return answers_of(samples, lambda sample: contexts.get(sample["hash"]) or firsts[_group(sample, together)])


def answers_of(samples: Iterable[dict[str, Any]], context: Callable[[dict[str, Any]], str]) -> Answers:
    """Return scores by task, length and question. `context` names the context of a sample."""
    answers: Answers = {}
    ratios: dict[Part, dict[str, tuple[str, float, float]]] = {}
    for sample in samples:
        name, key = sample["suite"], sample["hash"]
        prompt = f"{name} {context(sample)}"
        part = Part(name, sample.get("task"), sample["length"])
        suite = SUITES.get(name)  # None: of a suite that is not registered now
        if suite is not None and suite.is_ratio:
            ratios.setdefault(part, {})[key] = (prompt, *suite.ratio_of(sample))
        elif "losses" in sample:
            for bucket in sample["losses"]:
                if bucket["value"] is not None:
                    span = part._replace(start=bucket["from"], stop=bucket["to"])
                    answers.setdefault(span, {})[key] = Answer(prompt, bucket["value"])
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


def _per_context(evals: Sequence[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """Return the number of consecutive questions on one context, by suite and length."""
    return {
        (entry["suite"], length): shared
        for entry in evals
        # Of mrcr, `needles` are the numbers of similar requests; each conversation has one question.
        if isinstance(shared := entry.get("questions") or entry.get("needles") or 1, int)
        for length in entry.get("lengths") or [entry.get("length")]
    }


def _group(sample: dict[str, Any], together: dict[tuple[str, int], int]) -> tuple[Any, ...]:
    size = together.get((sample["suite"], sample["length"]), 1)
    return sample["suite"], sample.get("task"), sample["length"], sample["index"] // size


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    # Not splitlines(), which also splits at separators inside outputs.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); score this model again.") from None


def value_of(answers: Answers, measure: Measure) -> float | None:
    """Return the value of a measure; None if one of its parts was not measured."""
    total = 0.0
    for weight, part in measure.parts:
        found = answers.get(part)
        if not found:
            return None
        total += weight * sum(answer.score for answer in found.values()) / len(found)
    return total


def count_of(answers: Answers, measure: Measure) -> int:
    """Return the number of questions, or of text windows."""
    return len({key for _, part in measure.parts for key in answers.get(part, {})})


def contributions_of(first: dict[int, Answers], second: dict[int, Answers], measure: Measure) -> Contributions:
    """Return the difference of two arms by seed and prompt, on the questions that both answered.

    A seed without a common question in one of the parts is excluded.
    """
    found: dict[int, dict[str, float]] = {}
    for seed in sorted(first.keys() & second.keys()):
        prompts: dict[str, float] = {}
        for weight, part in measure.parts:
            ours, theirs = first[seed].get(part, {}), second[seed].get(part, {})
            both = sorted(ours.keys() & theirs.keys())
            if not both:
                prompts = {}
                break
            for key in both:
                gain = weight * (ours[key].score - theirs[key].score) / len(both)
                prompts[ours[key].prompt] = prompts.get(ours[key].prompt, 0.0) + gain
        if prompts:
            found[seed] = prompts
    return found


def common_questions(
    first: dict[int, Answers], second: dict[int, Answers], measure: Measure, seeds: Sequence[int]
) -> int:
    return sum(
        len({key for _, part in measure.parts for key in first[seed].get(part, {}).keys() & second[seed].get(part, {})})
        for seed in seeds
    )
