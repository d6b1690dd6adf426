"""`mode: reference`: RULER's own procedure with identical random draws (NVIDIA/RULER c3f5e3b).

RULER's scripts draw all samples of a task and length from one random stream, after a search for the haystack size that
uses the same stream. This module draws the same numbers in the same order. With RULER's words, data, tokenizer and
seed, its prompts equal those of RULER's scripts.

Differences of `fixed` mode (tests/evals/ruler/test_defects.py and test_scoring.py show both modes):

- Depths. RULER shuffles documents and needles with one seed, so gold texts stay at one depth. It draws the depths of
  single needles at random, and puts common words of `cwe` and `fwe` at the same places. `fixed` spreads gold texts
  evenly over 40 depths and draws a new order for every question.
- Length. RULER determines the haystack size once, on random prompts, and shortens prompts that are too long (at 4K by
  up to half). It retries lengths that are too short forever. `fixed` fills the length within 1%, and refuses lengths
  that are too short.
- Questions. RULER uses file order, and repeats the gold document when documents run out. `fixed` draws from the whole
  file and repeats only distractors.
- Keys and values. RULER draws with repetition, renames the example of `vt` by search and replace, and the example of
  `cwe` may share words with the list. In `fixed`, all are distinct, and every question has its own example.
- In RULER, `vt` ends in a space, which most tokenizers join with the next word. `fixed` has no trailing space.
- Scores. RULER accepts any substring: "no" is found in "I do not know". `fixed` counts whole words.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.core.errors import ConfigError
from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler.fitting import Draft, TaskSpec, to_question
from unspool.evals.suites.ruler.haystacks import Sources

# At its smallest size, RULER retries forever. A prompt that failed this often never fits.
_MOST_RETRIES = 100


class Draws:
    """The two random streams of a script of RULER."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numpy = np.random.RandomState(seed % 2**32)
        self.seed = seed

    @property
    def state(self) -> Any:
        return self.random.getstate(), self.numpy.get_state()

    def restore(self, state: Any) -> None:
        self.random.setstate(state[0])
        self.numpy.set_state(state[1])

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        """Shuffle by the seed only: all lists of one length get the same permutation."""
        found = list(items)
        random.Random(self.seed).shuffle(found)
        return found

    def letters(self, alphabet: str, count: int) -> str:
        return "".join(self.random.choices(alphabet, k=count))


@dataclass(frozen=True, kw_only=True)
class Script:
    """The parts in which RULER's generators differ."""

    generate: Callable[[int, int], Draft]  # arguments: index and size; ValueError if RULER's code raises
    step: int  # size reduction for a sample that is too long
    trial: int = 0  # size of the prompt that estimates tokens per unit; `step` if 0
    most: Callable[[float, float], int] = lambda limit, per_unit: int(limit / per_unit * 3)
    finish: Callable[[Draft], Draft] = lambda draft: draft  # applied to samples, not to prompts of the search
    example_tokens: int = 0  # tokens that `finish` adds
    may_exceed: bool = False  # whether to accept a prompt of fewer than two steps that is too long


class Run:
    """The samples of one task and length, in order.

    A sample depends on all earlier draws. The state before each sample is kept, so that it can be rebuilt.
    """

    def __init__(self, draws: Draws, sample: Callable[[int], tuple[Draft, int]]) -> None:
        self._draws, self._sample = draws, sample
        self._states = [draws.state]

    def sample(self, index: int) -> tuple[Draft, int]:
        """Return the sample and the size of its haystack."""
        start = min(index, len(self._states) - 1)
        self._draws.restore(self._states[start])
        for at in range(start, index):
            self._build(at)
        return self._build(index)

    def _build(self, index: int) -> tuple[Draft, int]:
        found = self._sample(index)
        if index + 1 == len(self._states):
            self._states.append(self._draws.state)
        return found


def build(sources: Sources, ask: Ask, spec: TaskSpec, script: Callable[[Sources, Ask, Draws], Script]) -> Question:
    """Build a question like RULER. Raises ConfigError if the length is too short."""

    def start() -> Run:
        draws = Draws(ask.seed)
        return start_run(sources, ask, spec, script(sources, ask, draws), draws)

    return build_from_run(sources, ask, spec, start)


def build_from_run(sources: Sources, ask: Ask, spec: TaskSpec, start: Callable[[], Run]) -> Question:
    """Build a question of a run, which is started only once."""
    run: Run = sources.cached((spec.task, "reference", ask.length, ask.seed, ask.overhead), start)
    return to_question(ask, *run.sample(ask.index))


def start_run(sources: Sources, ask: Ask, spec: TaskSpec, script: Script, draws: Draws) -> Run:
    """Find the haystack size by binary search over random prompts, like RULER."""
    budget = spec.budget(ask)

    def count(draft: Draft) -> int:
        return sources.count(draft.prompt.text)

    def search() -> int:
        trial = script.trial or script.step
        per_unit = count(script.generate(0, trial)) / trial
        low, high = script.step, max(script.most(ask.length - ask.overhead, per_unit), 2 * script.step)
        best = script.step
        while low <= high:
            middle = (low + high) // 2
            if count(script.generate(0, middle)) + script.example_tokens <= budget.tokens:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    try:
        first_size = search()
    except ValueError as error:
        raise ConfigError(
            f"ruler {spec.task}: RULER's own code fails with seed {ask.seed}; use another seed."
        ) from error

    def sample(index: int) -> tuple[Draft, int]:
        size, used = first_size, 0
        for _ in range(first_size // script.step + _MOST_RETRIES):
            try:
                draft = script.finish(script.generate(index, size))
                used = count(draft)
                if used <= budget.tokens or (script.may_exceed and size < 2 * script.step):
                    return draft, size
            except ValueError:
                pass  # RULER treats this like a prompt that is too long
            size -= script.step if size > script.step else 0
        raise budget.too_short(used or budget.tokens + 1)

    return Run(draws, sample)
