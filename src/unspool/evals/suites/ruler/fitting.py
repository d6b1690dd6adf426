"""Fit RULER's haystacks to a length in `fixed` mode, and place the gold texts.

A task provides a builder from a size (words, lines, characters) to a `Draft`. `build_fixed` finds a size within 1% of
the length that does not exceed it. It raises ConfigError if the smallest prompt is too long. All random draws depend
only on seed, task, length and index. `reference` mode is in published.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from unspool.core.rng import rng_for
from unspool.evals.suite import Ask, Question, TooShortError
from unspool.evals.suites.ruler.haystacks import Sources
from unspool.evals.wording import PREFIX, Wording

# Tolerance, and the target margin below the limit, as shares of the length.
TOLERANCE = 0.0075
AIM = 0.003
# After this many interpolation steps, `fit` bisects. Bisection needs at most the second number of steps.
_MOST_INTERPOLATIONS = 8
_MOST_STEPS = 60
# Index of the calibration question. No question of a run has it.
CALIBRATION = -1
# Below this length, RULER uses smaller haystack steps and fewer repeats.
SHORT = 4096
# Number of depths for a single gold text, as in RULER's essays.
GRID = 40
# Coprime to the grid, so that all depths are used and consecutive depths are far apart.
_STRIDE = 17

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    task: str
    length: int
    tokens: int  # tokens available for the prompt's own text

    def too_short(self, needed: int) -> TooShortError:
        return TooShortError("ruler", self.length, {self.task: self.length - self.tokens + needed})


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Name of a task, and its maximum answer tokens."""

    task: str
    answer_tokens: int

    def budget(self, ask: Ask) -> TokenBudget:
        return TokenBudget(task=self.task, length=ask.length, tokens=ask.length - ask.overhead - self.answer_tokens)

    def rng(self, ask: Ask, *purpose: str | int) -> np.random.Generator:
        return rng_for(ask.seed, "ruler", self.task, ask.mode, ask.length, ask.index, *purpose)


@dataclass(frozen=True)
class PromptText:
    """Text before the question, the question, and the start of the answer."""

    context: str
    question: str
    prefix: str
    example: str = ""  # a worked example before the context; RULER counts it separately in its size search

    @property
    def text(self) -> str:
        return self.example + self.context + self.question + self.prefix


@dataclass(frozen=True, kw_only=True)
class Draft:
    prompt: PromptText
    references: tuple[str, ...]
    depths: tuple[float, ...] = ()  # depths of all gold texts
    meta: Mapping[str, Any] = field(default_factory=dict)


Builder = Callable[[int], Draft]  # argument: a size


def fill_prompt(
    wording: Wording, task: str, context: str, *, trailing_space: bool = False, **values: str
) -> PromptText:
    """Fill a task's texts. Newlines after the context belong to the context.

    Trailing spaces of a prefix are removed unless `trailing_space` is set, as in RULER. Most tokenizers join a space
    with the next word, so models continue badly after a trailing space.
    """
    before, after = wording.around(task, **values)
    question = after.lstrip("\n")
    newlines = after[: len(after) - len(question)]
    prefix = wording.fill(task, PREFIX, **values)
    return PromptText(before + context + newlines, question, prefix if trailing_space else prefix.rstrip(" "))


def build_fixed(
    sources: Sources, ask: Ask, spec: TaskSpec, builder: Callable[[Sources, Ask], Builder], *, fewest: int, guess: int
) -> Question:
    """Build a question that fills the length. `fewest` is the smallest size, `guess` the first size to try."""
    budget = spec.budget(ask)

    def fitted(ask: Ask, start: int) -> tuple[Draft, int]:
        return fit(
            builder(sources, ask), lambda draft: sources.count(draft.prompt.text), budget, fewest=fewest, start=start
        )

    key = (spec.task, ask.length, ask.seed, ask.overhead)
    start = sources.cached(key, lambda: fitted(replace(ask, index=CALIBRATION), guess)[1])
    return to_question(ask, *fitted(ask, start))


def to_question(ask: Ask, draft: Draft, size: int) -> Question:
    depths = [round(depth, 4) for depth in draft.depths]
    return Question(
        context=draft.prompt.example + draft.prompt.context,
        question=draft.prompt.question,
        prefix=draft.prompt.prefix,
        references=draft.references,
        depth=depths[0] if len(depths) == 1 else None,
        meta={"mode": ask.mode, "size": size, "depths": depths, **draft.meta},
    )


def fit(
    build: Callable[[int], Made], count: Callable[[Made], int], budget: TokenBudget, *, fewest: int, start: int
) -> tuple[Made, int]:
    """Find the size whose prompt fills the budget, by interpolation from `start`. Returns (prompt, size)."""
    best: tuple[Made, int] | None = None
    low, high = fewest - 1, 0  # largest size known to fit; smallest size known not to fit, 0 if none
    size = max(start, fewest)
    for step in range(_MOST_STEPS):
        made = build(size)
        used = count(made)
        if used <= budget.tokens:
            best, low = (made, size), size
            if budget.tokens - used <= TOLERANCE * budget.length:
                break
        elif size == fewest:
            raise budget.too_short(used)
        else:
            high = size
        change = (budget.tokens - AIM * budget.length - used) / (used / size)
        bisect = step >= _MOST_INTERPOLATIONS
        size = (low + (high or 2 * size)) // 2 if bisect else size + (int(np.floor(change)) or 1)
        size = max(low + 1, fewest, min(size, high - 1) if high else size)
        if high and size >= high:
            break
    assert best is not None, "the smallest size was tried or is known to fit"
    return best


def grid_depth(index: int) -> float:
    """Depth of a single gold text. `GRID` consecutive indices use every depth once."""
    return index * _STRIDE % GRID / (GRID - 1)


def stratified_depths(count: int, rng: np.random.Generator) -> list[float]:
    """Draw one depth from each of `count` equal parts of the context."""
    return [float(depth) for depth in (np.arange(count) + rng.random(count)) / count]
