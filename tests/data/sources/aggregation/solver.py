"""A second solution of inserted tasks: it reads a finished document, finds the tasks in it, and answers them itself.

It shares the wordings with the package, and nothing else.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from unspool.data.sources.aggregation import passages, word_counts

_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: number for number, word in enumerate(_ONES.split())}
NUMBER_WORDS |= {word: 10 * at for at, word in enumerate(_TENS.split())}


class Solved(NamedTuple):
    """One task of a document: what it asks for, the answer in the document, and the solver's answer."""

    asked: str
    given: object
    right: object


def solve(document: str) -> Iterator[Solved]:
    """Yield all tasks of a document. A task is about the text since the task before, or the document's start."""
    lines = document.split("\n")
    begin = at = 0
    while at < len(lines):
        found = _counts_at(lines, at, begin) or _passages_at(lines, at, begin)
        if found is None:
            at += 1
            continue
        solved, at = found
        yield from solved
        begin = at


def _counts_at(lines: list[str], at: int, begin: int) -> tuple[list[Solved], int] | None:
    if lines[at] not in word_counts.HEADINGS:
        return None
    section = "\n".join(lines[begin:at])
    solved = []
    at += 1
    while at + 2 < len(lines) and lines[at] == "" and (word := _asked_word(lines[at + 1])):
        solved.append(Solved(word, _number(lines[at + 2]), _count(section, word)))
        at += 3
    return solved, at


def _asked_word(line: str) -> str | None:
    for question in word_counts.QUESTIONS:
        before, after = question.split("{word}")
        found = re.fullmatch(r"(?:Question: |Q: |– )?" + re.escape(before) + r"(\S+)" + re.escape(after), line)
        if found:
            return found[1]
    return None


def _number(line: str) -> int:
    digits = re.findall(r"\d+", line)
    if digits:
        return int(digits[0])
    total = held = 0
    for word in re.findall(r"[a-z]+", line.lower().replace("answer", "").replace("a: ", "")):
        if word == "hundred":
            held *= 100
        elif word == "thousand":
            total, held = total + 1000 * held, 0
        else:
            held += NUMBER_WORDS.get(word, 0)
    return total + held


def _count(section: str, word: str) -> int:
    """Count a word by walking over the characters."""
    found, run = 0, ""
    for character in section + " ":
        if character.isalpha():
            run += character
            continue
        found += run.lower() == word
        run = ""
    return found


def _passages_at(lines: list[str], at: int, begin: int) -> tuple[list[Solved], int] | None:
    for heading, mark in passages.FORMS:
        height = heading.count("\n") + 1
        pattern = re.escape(heading).replace(r"\{phrase\}", "(.+?)").replace(r"\{count\}", r"(?P<count>\d+)")
        found = re.fullmatch(pattern, "\n".join(lines[at : at + height]))
        if not found or lines[at - 1] != "":
            continue
        section, stop = "\n".join(lines[begin:at]), at + height
        given = []
        while lines[stop] != "":
            prefix = mark.format(number=len(given) + 1)
            assert lines[stop].startswith(prefix), lines[stop]
            given.append(lines[stop].removeprefix(prefix))
            stop += 1
        if "count" in found.groupdict():
            assert int(found["count"]) == len(given), "the heading gives the number of passages"
        return [Solved(found[1], given, _sentences_with(section, found[1]))], stop
    return None


def _sentences_with(section: str, phrase: str) -> list[str]:
    """Find sentences by walking over the characters; a phrase begins and ends at the borders of words."""
    sentences, held = [], ""
    for character in " ".join(section.split()):
        if character == " " and held.endswith((".", "!", "?")):
            sentences.append(held)
            held = ""
        else:
            held += character
    return [sentence for sentence in [*sentences, held] if _holds(sentence.lower(), phrase)]


def _holds(sentence: str, phrase: str) -> bool:
    at = sentence.find(phrase)
    while at >= 0:
        around = sentence[at - 1 : at] + sentence[at + len(phrase) : at + len(phrase) + 1]
        if not any(character.isalpha() for character in around):
            return True
        at = sentence.find(phrase, at + 1)
    return False
