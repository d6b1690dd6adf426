"""Solves attribute inclusion with one set of marks per thing."""

from collections.abc import Callable

from unspool.data.sources.synthetic.attributes import (
    COUNT_ALL,
    COUNT_ANY,
    FACTS,
    HAS_ALL,
    HAS_ALL_BUT,
    INCLUDES,
    MARKS,
    NONE,
    THING,
)
from unspool.data.sources.synthetic.draft import WORD

from .reading import (
    Solution,
    UnsolvableError,
    find_facts,
    read_parts,
    read_question,
    unknown,
)

_ALL = {"marks": f"{WORD}(?: and {WORD})+", "other": WORD}
_ANY = {"marks": f"{WORD}(?: or {WORD})+"}

Marked = dict[str, tuple[set[str], int]]  # a thing's marks and their positions


def solve(text: str) -> list[Solution]:
    context, questions, _ = read_parts(text)
    found = find_facts(context, FACTS, thing=THING, marks=MARKS)
    marked: Marked = {match["thing"]: (set(match["marks"].split(", ")), match.start()) for match in found}
    if len(marked) < len(found):
        raise UnsolvableError("a thing is described twice")
    return [_answer(question, marked) for question in questions]


def _answer(question: str, marked: Marked) -> Solution:
    if asked := read_question(question, INCLUDES, thing=THING, mark=WORD):
        if asked["thing"] not in marked:
            raise UnsolvableError(f"{asked['thing']} is not described")
        marks, place = marked[asked["thing"]]
        return Solution("yes" if asked["mark"] in marks else "no", [place])
    if asked := read_question(question, COUNT_ANY, **_ANY):
        wanted = set(asked["marks"].split(" or "))
        return _counted(marked, lambda marks: bool(marks & wanted))
    for wordings in (HAS_ALL_BUT, HAS_ALL, COUNT_ALL):
        if asked := read_question(question, wordings, **_ALL):
            wanted = set(asked["marks"].split(" and "))
            if wordings is COUNT_ALL:
                return _counted(marked, lambda marks, wanted=wanted: wanted <= marks)  # type: ignore[misc]
            there = {
                thing: place
                for thing, (marks, place) in marked.items()
                if wanted <= marks and asked.get("other", "") not in marks
            }
            return Solution(", ".join(there) or NONE, list(there.values()))
    raise unknown(question)


def _counted(marked: Marked, matches: Callable[[set[str]], bool]) -> Solution:
    places = [place for marks, place in marked.values() if matches(marks)]
    return Solution(str(len(places)), places)
