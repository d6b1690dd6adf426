"""From a task's builder to the question that is asked: both modes go through here.

In: the suite's sources, `Ask`, a builder. Out: `Question`.
Promise: everything random comes from seed, task, length and index, so questions are the same in any order and process.
Elsewhere: sizes (fitting.py), what is drawn (needles.py, tracing.py, counting_words.py, questions.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from unspool.core.rng import rng_for
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler.fitting import Room, fit, reference_fit, reference_size
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.suites.ruler.task_texts import Parts

# Stands for no question: the one that a length is calibrated with.
NO_INDEX = -1


@dataclass(frozen=True, kw_only=True)
class Draft:
    parts: Parts
    references: tuple[str, ...]
    depths: tuple[float, ...] = ()  # of everything that the answer needs
    meta: Mapping[str, Any] = field(default_factory=dict)


Builder = Callable[[int], Draft]  # from a size
RandomBuilder = Callable[[int, np.random.Generator], Draft]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which task, and how much of the length its answer takes."""

    task: str
    answer_tokens: int

    def room(self, ask: Ask) -> Room:
        return Room(task=self.task, length=ask.length, budget=ask.length - ask.overhead - self.answer_tokens)

    def rng(self, ask: Ask, *purpose: str | int) -> np.random.Generator:
        return rng_for(ask.seed, "ruler", self.task, ask.mode, ask.length, ask.index, *purpose)


def fixed(
    sources: Sources, ask: Ask, place: Place, builder: Callable[[Ask], Builder], *, fewest: int, guess: int
) -> Question:
    room = place.room(ask)

    def fitted(ask: Ask, start: int) -> tuple[Draft, int]:
        return fit(builder(ask), lambda draft: sources.count(draft.parts.text), room, fewest=fewest, start=start)

    key = (place.task, ask.length, ask.seed, ask.overhead)
    start = sources.remembered(key, lambda: fitted(replace(ask, index=NO_INDEX), guess)[1])
    draft, size = fitted(ask, start)
    return asked(draft, ask, size)


def reference(
    sources: Sources,
    ask: Ask,
    place: Place,
    builder: Callable[[Ask], RandomBuilder],
    *,
    step: int,
    trial: int | None = None,
    most_factor: int = 3,
) -> Question:
    """`trial`: the size from which RULER guesses tokens per unit."""
    room = place.room(ask)

    def tokens(size: int, attempt: int) -> int:
        searching = replace(ask, index=NO_INDEX)
        return sources.count(builder(searching)(size, place.rng(searching, attempt)).parts.text)

    key = (place.task, "reference", ask.length, ask.seed, ask.overhead)
    size = sources.remembered(
        key, lambda: reference_size(tokens, room, step=step, trial=trial or step, most_factor=most_factor)
    )
    build = builder(ask)
    draft, used = reference_fit(
        lambda size, attempt: (build(size, place.rng(ask, attempt)), size),
        lambda made: sources.count(made[0].parts.text),
        room,
        step=step,
        size=size,
    )
    return asked(draft, ask, used)


def asked(draft: Draft, ask: Ask, size: int) -> Question:
    depths = [round(depth, 4) for depth in draft.depths]
    return Question(
        context=draft.parts.context,
        question=draft.parts.question,
        prefix=draft.parts.prefix,
        references=draft.references,
        depth=depths[0] if len(depths) == 1 else None,
        meta={"mode": ask.mode, "size": size, "depths": depths, **draft.meta},
    )
