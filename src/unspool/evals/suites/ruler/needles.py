"""The eight needle tasks: facts hidden in noise, in essays or among other facts.

In: sources, `Ask`. Out: `Question`.
Promise (`fixed`): keys and values are all different, those of the haystack included; a single gold walks over the grid
of depths by index, several stand one in each equal part; essays begin at a random sentence.
`reference` follows RULER: keys and values drawn with repetition, depths drawn anew for every sample, essays always from
their beginning, the order of needles shuffled by a seed that never changes.
Price: the last line of a haystack may be cut short to meet the length (`fixed`).
"""

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unspool.evals.suite import Ask, Question
from unspool.evals.suites.ruler import fitting
from unspool.evals.suites.ruler.haystacks import Essay, Sources
from unspool.evals.suites.ruler.question import Builder, Draft, Place, RandomBuilder, fixed, reference
from unspool.evals.suites.ruler.task_texts import needle, niah
from unspool.evals.wording import Wording

# Facts to hide: what the eight needle tasks differ in, and how their keys and values are drawn.


Values = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    name: str
    haystack: Literal["noise", "essay", "needle"]
    key: Values = "words"
    value: Values = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


@dataclass(frozen=True)
class Hidden:
    """Facts, in the order in which they stand in the text, and what is asked about them."""

    facts: list[str]
    gold: list[int]  # which facts the answer needs
    queries: list[str]
    answers: tuple[str, ...]

    def draft(self, task: Facts, wording: Wording, haystack: str, places: Sequence[float]) -> Draft:
        parts = niah(wording, task.name, haystack, self.queries, task.value, one=len(self.answers) == 1)
        at = parts.context.find(self.answers[0])
        return Draft(
            parts=parts,
            references=self.answers,
            depths=tuple(places[at] for at in self.gold),
            meta={"keys": self.queries, "answer_char": at},
        )


def between(pieces: list[str], places: Sequence[int], facts: Sequence[str], joint: str = " ") -> list[str]:
    """Facts at their places, which rise."""
    found: list[str] = []
    done = 0
    for place, fact in zip(places, facts, strict=True):
        found += [joint.join(pieces[done:place])] if place > done else []
        found.append(fact)
        done = place
    return [*found, joint.join(pieces[done:])] if done < len(pieces) else found


class Drawn:
    """Different keys and different values, as many as the haystack could need; written out when asked for."""

    def __init__(self, task: Facts, sources: Sources, count: int, rng: np.random.Generator) -> None:
        self._task, self._words = task, sources.words
        self._needle = needle(sources.wording, task.name, task.value)
        self._keys = self._numbers(task.key, count, rng)
        self._values = self._numbers(task.value, count * task.num_values, rng)

    def key(self, at: int) -> str:
        return self._written(self._task.key, self._keys, at)

    def value(self, at: int) -> str:
        return self._written(self._task.value, self._values, at)

    def line(self, at: int) -> str:
        return self.fact(at, at)

    def fact(self, key: int, value: int) -> str:
        return self._needle(self.key(key), self.value(value))

    def _numbers(self, kind: Values, count: int, rng: np.random.Generator) -> np.ndarray | bytes:
        if kind == "uuids":
            return rng.bytes(16 * count)  # 122 random bits: no two are equal
        pool = len(self._words) ** 2 if kind == "words" else 9_000_000
        return rng.choice(pool, size=count, replace=False)

    def _written(self, kind: Values, drawn: np.ndarray | bytes, at: int) -> str:
        if isinstance(drawn, bytes):
            return str(uuid.UUID(bytes=drawn[16 * at : 16 * at + 16], version=4))
        number = int(drawn[at])
        if kind == "numbers":
            return str(1_000_000 + number)
        first, second = divmod(number, len(self._words))
        return f"{self._words[first]}-{self._words[second]}"


def hide(task: Facts, sources: Sources, rng: np.random.Generator, drawn: Drawn | None = None) -> Hidden:
    """Facts in random order; the first `num_queries` keys drawn are asked for."""
    num_keys = max(task.num_keys, task.num_queries)
    source = drawn or Drawn(task, sources, num_keys, rng)
    pairs = [(key, key * task.num_values + at) for key in range(num_keys) for at in range(task.num_values)]
    order = rng.permutation(len(pairs)).tolist()
    return Hidden(
        facts=[source.fact(*pairs[at]) for at in order],
        gold=[place for place, at in enumerate(order) if pairs[at][0] < task.num_queries],
        queries=[source.key(at) for at in range(task.num_queries)],
        answers=tuple(source.value(at) for key, at in pairs if key < task.num_queries),
    )


def one(kind: Values, words: list[str], rng: np.random.Generator) -> str:
    if kind == "uuids":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    if kind == "numbers":
        return str(rng.integers(1_000_000, 10_000_000))
    first, second = rng.integers(len(words), size=2)
    return f"{words[first]}-{words[second]}"


ANSWER_TOKENS = 128
# No tokenizer writes a needle's line in fewer tokens.
_FEWEST_LINE_TOKENS = 12
# A line counts this much, so that its last one can be cut to meet a length.
PER_LINE = 16
_ESSAY_STEP = 500
# RULER: below this length haystacks of lines change by fewer lines.
SHORT = 4096


@dataclass(frozen=True, kw_only=True)
class Needles(Facts):
    @property
    def place(self) -> Place:
        return Place(task=self.name, answer_tokens=ANSWER_TOKENS)

    def build(self, sources: Sources, ask: Ask) -> Question:
        if ask.mode == "reference":
            lines = self.haystack != "essay"
            step = (5 if ask.length < SHORT else 25) if lines else _ESSAY_STEP
            return reference(sources, ask, self.place, lambda ask: _reference(self, sources, ask), step=step)
        if self.haystack == "essay":
            return fixed(
                sources, ask, self.place, lambda ask: _essay(self, sources, ask), fewest=40, guess=ask.length // 2
            )
        guess = ask.length * PER_LINE // 32
        return fixed(sources, ask, self.place, lambda ask: _lines(self, sources, ask), fewest=PER_LINE, guess=guess)


def _essay(task: Needles, sources: Sources, ask: Ask) -> Builder:
    rng = task.place.rng(ask)
    hidden = hide(task, sources, rng)
    targets = _targets(hidden, ask.index, rng)
    essay = sources.essay
    first = int(rng.choice(essay.ends)) % len(essay.words)

    def build(size: int) -> Draft:
        borders = essay.borders(first, size)
        places = [int(borders[np.abs(borders - target * size).argmin()]) for target in targets]
        pieces = between(essay.stretch(first, size), places, hidden.facts)
        return hidden.draft(task, sources.wording, " ".join(pieces), [place / size for place in places])

    return build


def _lines(task: Needles, sources: Sources, ask: Ask) -> Builder:
    rng = task.place.rng(ask)
    most = max(1, ask.length // _FEWEST_LINE_TOKENS) if task.haystack == "needle" else 0
    drawn = Drawn(task, sources, most + task.num_keys, rng)
    hidden = hide(task, sources, rng, drawn)
    noise = _noise(task, sources)
    targets = _targets(hidden, ask.index, rng)

    def build(size: int) -> Draft:
        count, rest = divmod(size, PER_LINE)
        if task.haystack == "noise":
            words = noise.split()
            lines = [noise] * count
            cut = " ".join(words[: len(words) * rest // PER_LINE])
        else:
            lines = [drawn.line(at + task.num_keys) for at in range(min(count + 1, most))]
            last = lines[count] if count < len(lines) else ""
            lines, cut = lines[:count], last[: len(last) * rest // PER_LINE].rstrip()
        lines += [cut] if cut else []
        places = [fitting.place(target, len(lines)) for target in targets]
        text = "\n".join(between(lines, places, hidden.facts, joint="\n"))
        return hidden.draft(task, sources.wording, text, [place / len(lines) for place in places])

    return build


def _reference(task: Needles, sources: Sources, ask: Ask) -> RandomBuilder:
    fact = needle(sources.wording, task.name, task.value)

    def build(size: int, rng: np.random.Generator) -> Draft:
        num_keys = max(task.num_keys, task.num_queries)
        keys = [one(task.key, sources.words, rng) for _ in range(num_keys)]
        values = [[one(task.value, sources.words, rng) for _ in range(task.num_values)] for _ in keys]
        owners = [at for at in range(num_keys) for _ in range(task.num_values)]
        facts = [fact(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        order = list(range(len(facts)))
        # The same permutation for every sample, as in RULER.
        random.Random(ask.seed).shuffle(order)
        asked = rng.permutation(num_keys)[: task.num_queries].tolist()
        hidden = Hidden(
            facts=[facts[at] for at in order],
            gold=[at for at, fact in enumerate(order) if owners[fact] in asked],
            queries=[keys[at] for at in asked],
            answers=tuple(value for at in asked for value in values[at]),
        )
        if task.haystack == "essay":
            text, places = _reference_essay(hidden.facts, sources.essay, size, rng)
        else:
            text, places = _reference_lines(task, hidden.facts, sources, size, rng)
        return hidden.draft(task, sources.wording, text, places)

    return build


def _reference_essay(facts: list[str], essay: Essay, size: int, rng: np.random.Generator) -> tuple[str, list[float]]:
    borders = essay.borders(0, size)
    percents = np.round(np.linspace(0, 100, fitting.GRID))
    drawn = np.sort(rng.choice(percents, size=len(facts), replace=False))
    sentences = len(borders) - 1
    at = [int(sentences * percent / 100) for percent in drawn]
    text = " ".join(between(essay.stretch(0, size), [int(borders[place]) for place in at], facts))
    return text, [place / sentences for place in at]


def _reference_lines(
    task: Needles, facts: list[str], sources: Sources, size: int, rng: np.random.Generator
) -> tuple[str, list[float]]:
    if task.haystack == "noise":
        lines = [_noise(task, sources)] * size
    else:
        fact, words = needle(sources.wording, task.name, task.value), sources.words
        lines = [fact(one(task.key, words, rng), one(task.value, words, rng)) for _ in range(size)]
    # RULER puts the first fact at the last place; with one fact, as in its tasks, there is no difference.
    places = sorted(rng.choice(size, size=len(facts), replace=False).tolist())
    return "\n".join(between(lines, places, facts, joint="\n")), [place / size for place in places]


def _noise(task: Needles, sources: Sources) -> str:
    return sources.wording.fill(task.name, "noise") if task.haystack == "noise" else ""


def _targets(hidden: Hidden, index: int, rng: np.random.Generator) -> list[float]:
    """Rising depths, one per fact."""
    if len(hidden.gold) > 1:
        return fitting.parts(len(hidden.facts), rng)
    gold, others = fitting.target(index), np.sort(rng.random(len(hidden.facts) - 1))
    # The facts before the gold one stand before it in the text as well.
    before, after = others[: hidden.gold[0]], others[hidden.gold[0] :]
    low = sorted(float(depth * gold) for depth in before)
    return [*low, gold, *sorted(float(gold + depth * (1 - gold)) for depth in after)]


TASKS = (
    Needles(name="niah_single_1", haystack="noise"),
    Needles(name="niah_single_2", haystack="essay"),
    Needles(name="niah_single_3", haystack="essay", value="uuids"),
    Needles(name="niah_multikey_1", haystack="essay", num_keys=4),
    Needles(name="niah_multikey_2", haystack="needle"),
    Needles(name="niah_multikey_3", haystack="needle", key="uuids", value="uuids"),
    Needles(name="niah_multivalue", haystack="essay", num_values=4),
    Needles(name="niah_multiquery", haystack="essay", num_queries=4),
)
