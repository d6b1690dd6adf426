"""The measures of a study: what its recipes' evals will give, by name, before anything is run.

In: recipes; the `compare` of a study file. Out: `Measure`s, each a weighted mean of `Part`s.
Names: `niah/32K`, `ruler/32K` (the mean of its tasks), `ruler/vt/32K`, `loss/16K-32K`.
Elsewhere: reading what was measured (study_scores.py), comparing arms (study_results.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from unspool.base.lookup import nearest
from unspool.base.sizes import format_size
from unspool.eval.config import LossEval, TaskEval
from unspool.eval.questions import chosen_tasks
from unspool.model.buckets import bucket_edges
from unspool.recipes.lines import Problem
from unspool.recipes.schema import Recipe

LOSS = "loss"


class Part(NamedTuple):
    """What samples are put together by: one task at one length, or one range of positions."""

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
    parts: tuple[tuple[float, Part], ...]
    """Weights sum to 1."""

    @property
    def is_loss(self) -> bool:
        return self.suite == LOSS

    @property
    def kind(self) -> Literal["score", "loss"]:
        return "loss" if self.is_loss else "score"

    @property
    def length(self) -> int:
        return max(part.length for _, part in self.parts)

    @property
    def lookups(self) -> set[str]:
        """What `compare` may call it: in full, by suite and task, or, as a whole, by suite."""
        return {self.name, f"{self.suite}/{self.task}"} if self.task else {self.name, self.suite}

    def is_beyond(self, context: int) -> bool:
        """Whether it asks for more than a model of this context had seen."""
        if self.is_loss:
            return all((part.start or 0) >= context for _, part in self.parts)
        return self.length > context


def measures_of(recipes: Sequence[Recipe]) -> list[Measure]:
    """Everything that the evals of these recipes measure, each once."""
    found: dict[str, Measure] = {}
    for recipe in recipes:
        for entry in recipe.evals:
            for measure in _of_eval(entry):
                found.setdefault(measure.name, measure)
    return list(found.values())


def _of_eval(entry: Any) -> Iterator[Measure]:
    if isinstance(entry, LossEval):
        for start, stop in pairwise(bucket_edges(entry.length)):
            part = Part(LOSS, None, entry.length, start, stop)
            yield _measure(f"{LOSS}/{format_size(start)}-{format_size(stop)}", part)
        return
    for length in sorted(entry.lengths):
        if not isinstance(entry, TaskEval):
            yield _measure(f"{entry.suite}/{format_size(length)}", Part(entry.suite, None, length))
            continue
        tasks = [_measure(f"{entry.suite}/{task.name}/{format_size(length)}", Part(entry.suite, task.name, length))
                 for task in chosen_tasks(entry)]  # fmt: skip
        yield mean_of(f"{entry.suite}/{format_size(length)}", tasks)
        yield from tasks


def _measure(name: str, part: Part) -> Measure:
    return Measure(name=name, suite=part.suite, task=part.task, parts=((1.0, part),))


def mean_of(name: str, measures: Sequence[Measure]) -> Measure:
    """The plain mean of several measures of one kind."""
    share = 1 / len(measures)
    parts = tuple((weight * share, part) for measure in measures for weight, part in measure.parts)
    return Measure(name=name, suite=measures[0].suite, task=None, parts=parts)


def compare_problems(data: Mapping[str, Any], measures: Sequence[Measure]) -> Iterator[Problem]:
    if not measures:
        yield Problem(place=("recipe",), text="it has no evals, so there is nothing to compare its arms by.")
    known = sorted(set().union(*(measure.lookups for measure in measures)))
    for at, name in enumerate(data.get("compare") or []):
        if name not in known:
            guess = nearest(name, known)
            hint = f"; did you mean {guess!r}?" if guess else "."
            text = f"{name!r} is not measured by the recipe's evals{hint} Measured: {', '.join(known)}."
            yield Problem(place=("compare", at), text=text)


def chosen_names(data: Mapping[str, Any], measures: Sequence[Measure]) -> list[str] | None:
    wanted = data.get("compare")
    if not wanted:
        return None
    return [measure.name for measure in measures if measure.lookups & set(wanted)]


def ranking(measures: Sequence[Measure], names: Sequence[str] | None, context: int | None) -> list[Measure]:
    """The measures that rank arms: those asked for, else those beyond the context, else the longest of each suite."""
    if names is not None:
        return [measure for measure in measures if measure.name in names]
    whole = [measure for measure in measures if measure.task is None]
    beyond = [measure for measure in whole if context is not None and measure.is_beyond(context)]
    if beyond:
        return beyond
    last = {measure.suite: measure for measure in whole}
    return list(last.values())
