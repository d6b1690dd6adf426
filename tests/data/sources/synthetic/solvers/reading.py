"""Parse a generated document: context, questions, stated answers; and sentences by their wording.

Nothing is skipped: a line after the first question that is neither a question nor its answer, or a question that
cannot be answered in exactly one way, is `UnsolvableError`.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from unspool.data.sources.synthetic.draft import LABELS, QUESTION_START, to_pattern


class UnsolvableError(Exception):
    """The text states too little, or too much, for one right answer."""


class Solution(NamedTuple):
    answer: str
    places: list[int]  # positions of the facts that decide it


class Parts(NamedTuple):
    context: str
    questions: list[str]
    answers: list[str]  # as the document states them


def read_parts(text: str) -> Parts:
    first = QUESTION_START.search(text)
    if first is None:
        raise UnsolvableError("there is no question")
    lines = [line for line in text[first.start() :].split("\n") if line]
    for ask, tell in LABELS:
        if all(line.startswith((ask, tell)[at % 2]) for at, line in enumerate(lines)) and len(lines) % 2 == 0:
            questions = [line.removeprefix(ask) for line in lines[::2]]
            return Parts(text[: first.start()], questions, [line.removeprefix(tell) for line in lines[1::2]])
    raise UnsolvableError("questions and answers do not alternate")


@cache
def _compiled(wording: str, slots: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    return re.compile(f"^{to_pattern(wording, dict(slots))}$", re.MULTILINE)


def find_facts(context: str, wordings: Iterable[str], **slots: str) -> list[re.Match[str]]:
    """All lines that match one of `wordings`, in the order of the text."""
    found = [match for wording in wordings for match in _compiled(wording, tuple(slots.items())).finditer(context)]
    return sorted(found, key=lambda match: match.start())


def read_question(question: str, wordings: Iterable[str], **slots: str) -> dict[str, str] | None:
    """Return the content of the slots if the question matches one of the wordings."""
    for wording in wordings:
        match = _compiled(wording, tuple(slots.items())).fullmatch(question)
        if match:
            return match.groupdict()
    return None


def only(found: Sequence[str], what: str) -> str:
    if len(found) != 1:
        raise UnsolvableError(f"{len(found)} answers to {what!r}")
    return found[0]


def unknown(question: str) -> UnsolvableError:
    return UnsolvableError(f"a question in unknown words: {question!r}")
