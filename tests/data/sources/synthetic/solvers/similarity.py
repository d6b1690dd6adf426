"""Solves similarity retrieval by comparing the query with the entries as texts, one by one or through an index."""

from collections import Counter
from operator import ne
from typing import NamedTuple

from unspool.data.sources.synthetic.draft import WORD
from unspool.data.sources.synthetic.similarity import (
    CODE_COUNTS,
    CODE_LEN,
    CODE_LETTERS,
    CODE_QUERIES,
    FIELDS,
    IDS,
    NOTE_COUNTS,
    NOTE_QUERIES,
    NOTE_WORDS,
    RECORD_FIELDS,
    RECORD_QUERIES,
)

from .reading import (
    Solution,
    UnsolvableError,
    find_facts,
    only,
    read_parts,
    read_question,
    unknown,
)

_NOTE = rf"{WORD}(?: {WORD}){{{NOTE_WORDS - 1}}}"
_RECORD = ", ".join(f"{field} {WORD}" for field in FIELDS)
_CODE = rf"[{CODE_LETTERS}]{{{CODE_LEN}}}"


class Entries(NamedTuple):
    contents: dict[str, str]  # by number
    places: dict[str, int]
    having: dict[str, list[str]]  # numbers of the entries that have a feature

    def get(self, number: str) -> str:
        if number not in self.contents:
            raise UnsolvableError(f"there is no entry {number}")
        return self.contents[number]

    def in_common(self, content: str) -> Counter[str]:
        """How many features each entry shares with `content`."""
        shared: Counter[str] = Counter()
        for feature in _features(content):
            shared.update(self.having.get(feature, ()))
        return shared


def _features(content: str) -> set[str]:
    """What is compared: the fields of a record, the words of a note, the letters of a code with their places."""
    if "," in content:
        return set(content.split(", "))
    if " " in content:
        return set(content.split())
    return {f"{place}{letter}" for place, letter in enumerate(content)}


def solve(text: str) -> list[Solution]:
    context, questions, _ = read_parts(text)
    for content in (_NOTE, _RECORD, _CODE):
        found = find_facts(context, IDS, id="[0-9]+", content=content)
        if not found:
            continue
        contents = {match["id"]: match["content"] for match in found}
        if len(contents) < len(found):
            raise UnsolvableError("two entries have the same number")
        having: dict[str, list[str]] = {}
        for number, said in contents.items():
            for feature in _features(said):
                having.setdefault(feature, []).append(number)
        entries = Entries(contents, {match["id"]: match.start() for match in found}, having)
        return [_answer(question, entries) for question in questions]
    raise UnsolvableError("there are no entries")


def _answer(question: str, entries: Entries) -> Solution:
    if asked := read_question(question, RECORD_QUERIES, content=_RECORD):
        shared = entries.in_common(asked["content"])
        found = [number for number, count in shared.items() if count >= len(FIELDS) - 1]
    elif asked := read_question(question, (*NOTE_QUERIES, *CODE_QUERIES), content=f"{_NOTE}|{_CODE}"):
        shared = entries.in_common(asked["content"])
        most = max(shared.values(), default=0)
        found = [number for number, count in shared.items() if count == most]
    else:
        return _compared(question, entries)
    number = only(found, question)
    return Solution(number, [entries.places[number]])


def _compared(question: str, entries: Entries) -> Solution:
    """Questions that name the entry."""
    if asked := read_question(question, NOTE_COUNTS, content=_NOTE, id="[0-9]+"):
        answer = str(len(set(entries.get(asked["id"]).split()) & set(asked["content"].split())))
    elif asked := read_question(question, CODE_COUNTS, content=_CODE, id="[0-9]+"):
        answer = str(sum(map(ne, entries.get(asked["id"]), asked["content"])))
    elif asked := read_question(question, RECORD_FIELDS, content=_RECORD, id="[0-9]+"):
        answer = only(_unlike(entries.get(asked["id"]), asked["content"]), question)
    else:
        raise unknown(question)
    return Solution(answer, [entries.places[asked["id"]]])


def _unlike(one: str, other: str) -> list[str]:
    """Names of the fields in which two records differ."""
    pairs = zip(one.split(", "), other.split(", "), strict=True)
    return [left.split()[0] for left, right in pairs if left != right]
