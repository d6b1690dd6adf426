"""Shared by all tasks: write a draft of facts and questions as one text of about the requested size.

A text has an opening, one fact per line, optional lines of prose between them, then questions, each followed by its
answer. `style` draws what stays the same when a document is generated again at another size (theme, wording, layout);
`rng` draws its content. No question occurs twice in a document. The size is met to within about one question.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np

from unspool.data.facts import word_list

# Prefixes of a question and of its answer.
LABELS = (
    ("Question: ", "Answer: "),
    ("Q: ", "A: "),
    ("Asked: ", "Answered: "),
    ("Problem: ", "Solution: "),
    ("Query: ", "Result: "),
    ("Exercise: ", "Key: "),
)
GAPS = ("\n", "\n\n")
QUESTION_START = re.compile("^(?:" + "|".join(re.escape(label) for label, _ in LABELS) + ")", re.MULTILINE)

# Patterns for the slots of wordings.
NAME = r"[A-Z][a-z]+(?: [A-Z][a-z]+)+"
LABEL = r"[a-z]+(?:-[a-z]+)+"
WORD = r"[a-z]+"
NUMBER = r"-?[0-9]+"
_SLOT = re.compile(r"\{(\w+)\}")

# Number of facts in the draft that measures the length of a fact.
TRIAL_FACTS = 24
TRIAL_STEP = 8  # for many facts, a second trial has this many times fewer
FEWEST_FACTS = 4
MOST_BUILDS = 3
FEWEST_QUESTIONS = 2
QUESTION_CHARS = 110
# A document is full after this many questions that are repeated or do not fit.
MOST_MISSES = 5

Choice = TypeVar("Choice")


class Question(NamedTuple):
    text: str
    answer: str


class Draft(NamedTuple):
    opening: str
    facts: list[str]
    questions: Iterator[Question]  # endless; may repeat
    echo: int = 0  # characters of the first answer, if it repeats the facts

    @property
    def size(self) -> int:
        """Number of characters, without most questions."""
        return len(self.opening) + sum(map(len, self.facts)) + len(self.facts) + self.echo


Builder = Callable[[np.random.Generator, int], Draft]  # called with the number of facts


class Layout(NamedTuple):
    labels: tuple[str, str]
    gap: str
    prose: float  # share of the context
    questions: float  # few (0) or many (1)


def draw_layout(style: np.random.Generator, *, with_prose: bool) -> Layout:
    share = float(style.uniform(0.1, 0.8)) if with_prose and style.random() < 0.7 else 0.0
    return Layout(pick(style, LABELS), pick(style, GAPS), share, float(style.random()))


def compose(
    build: Builder, layout: Layout, chars: int, prose: Sequence[str], rng: np.random.Generator
) -> tuple[str, int]:
    """Write a document of about `chars` characters; also return how many of them precede the questions."""
    question_room = min(0.3 * chars, (4 + layout.questions * min(60, chars / 1500)) * QUESTION_CHARS)
    question_room = max(question_room, 0.01 * chars)
    slack = max(question_room / 4, 0.01 * chars)
    draft = _build_draft(build, (chars - question_room) * (1 - layout.prose), slack * (1 - layout.prose), rng)
    lines = draft.facts
    if layout.prose:
        size = draft.size * layout.prose / (1 - layout.prose)
        lines = scatter(lines, prose_lines(prose, size, rng), rng)
    context = "\n".join([draft.opening, *lines]) + "\n"
    asked = _write_questions(draft.questions, layout, chars - len(context))
    return context + asked, len(context)


def _build_draft(build: Builder, room: float, slack: float, rng: np.random.Generator) -> Draft:
    """Build a draft of about `room` characters. Trials measure how long a fact is; that grows with their number."""
    draft = build(rng, TRIAL_FACTS)
    num = max(FEWEST_FACTS, round(TRIAL_FACTS * room / draft.size))
    if num > TRIAL_FACTS * TRIAL_STEP**2:
        second = build(rng, num // TRIAL_STEP)
        each, later = draft.size / TRIAL_FACTS, second.size / len(second.facts)
        growth = (later - each) / np.log(len(second.facts) / TRIAL_FACTS)
        num = round(room / (later + growth * np.log(TRIAL_STEP)))
    for _ in range(MOST_BUILDS):
        draft = build(rng, num)
        if room - slack <= draft.size <= room + slack / 2:  # questions fill the rest
            break
        num = max(FEWEST_FACTS, round(num * room / draft.size))
    return draft


def _write_questions(questions: Iterator[Question], layout: Layout, room: int) -> str:
    """Write questions with their answers until `room` is used up, at least a few."""
    parts: list[str] = []
    known: set[str] = set()
    misses = 0
    for question in questions:
        part = f"{layout.gap}{layout.labels[0]}{question.text}\n{layout.labels[1]}{question.answer}"
        fits = len(part) <= room or len(parts) < FEWEST_QUESTIONS
        if question.text in known or not fits:
            misses += 1
            if misses == MOST_MISSES:
                break
            continue
        known.add(question.text)
        parts.append(part)
        room -= len(part)
    return "".join(parts)


def prose_lines(sentences: Sequence[str], chars: float, rng: np.random.Generator) -> list[str]:
    """Return consecutive sentences from a random start, one to four per line."""
    lines: list[str] = []
    at = int(rng.integers(len(sentences)))
    while chars > 0:
        count = int(rng.integers(1, 5))
        lines.append(" ".join(sentences[(at + step) % len(sentences)] for step in range(count)))
        at += count
        chars -= len(lines[-1]) + 1
    return lines


def scatter(facts: list[str], others: list[str], rng: np.random.Generator) -> list[str]:
    """Merge both lists at random; each keeps its order."""
    from_facts = np.ones(len(facts) + len(others), dtype=bool)
    from_facts[rng.choice(len(from_facts), size=len(others), replace=False)] = False
    left, right = iter(facts), iter(others)
    return [next(left) if fact else next(right) for fact in from_facts.tolist()]


@cache
def words() -> tuple[str, ...]:
    """Return the included words, read once per process."""
    return tuple(word_list())


def shuffled_words(rng: np.random.Generator) -> list[str]:
    return [words()[at] for at in rng.permutation(len(words())).tolist()]


def pick(rng: np.random.Generator, choices: Sequence[Choice]) -> Choice:
    return choices[int(rng.integers(len(choices)))]


def pick_each(rng: np.random.Generator, choices: Sequence[Choice], count: int) -> list[Choice]:
    return [choices[at] for at in rng.integers(len(choices), size=count).tolist()]


def name_parts(rng: np.random.Generator, count: int) -> list[list[str]]:
    """Draw `count` different groups of words: pairs, or larger groups if there are too few pairs."""
    known = words()
    size = len(known)
    joined = 2
    while size**joined < 3 * count:
        joined += 1
    drawn = rng.choice(size**joined, size=count, replace=False)
    columns = [[known[at] for at in (drawn // size**place % size).tolist()] for place in range(joined)]
    return [list(parts) for parts in zip(*columns, strict=True)]


def labels(rng: np.random.Generator, count: int, joint: str = "-") -> list[str]:
    """Draw different names for things, such as amber-falcon."""
    return [joint.join(parts) for parts in name_parts(rng, count)]


def names(rng: np.random.Generator, count: int) -> list[str]:
    """Draw different names for people and places, such as Amber Falcon."""
    return [" ".join(parts).title() for parts in name_parts(rng, count)]


def numbers(rng: np.random.Generator, count: int, *, smallest: int = 100) -> np.ndarray:
    """Draw different whole numbers in random order."""
    return smallest + rng.choice(max(10 * count, 10_000 - smallest), size=count, replace=False)


def to_pattern(wording: str, slots: Mapping[str, str], *, named: bool = True) -> str:
    """Turn a wording into a regular expression in which each slot, such as {thing}, is a group."""
    parts = _SLOT.split(wording)
    groups = [f"(?P<{name}>{slots[name]})" if named else f"(?:{slots[name]})" for name in parts[1::2]]
    return re.escape(parts[0]) + "".join(
        group + re.escape(text) for group, text in zip(groups, parts[2::2], strict=True)
    )


def lines_like(wordings: Iterable[str], **slots: str) -> re.Pattern[str]:
    """Match any line that could be read as one of `wordings`."""
    return re.compile("(?:" + "|".join(to_pattern(wording, slots, named=False) for wording in wordings) + ")$")
