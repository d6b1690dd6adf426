"""Facts to hide: what the eight needle tasks differ in, and how their keys and values are drawn.

In: a task's numbers, words, a generator. Out: facts in the order of the text, what is asked, the answers.
Promise: `Drawn` gives keys and values that are all different; `one` draws with repetition, as RULER does.
Elsewhere: where facts stand (needles.py), how they are worded (wording.py).
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from unspool.eval.ruler.draft import Draft
from unspool.eval.ruler.sources import Sources
from unspool.eval.ruler.wording import needle, niah
from unspool.eval.wording import Wording

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
