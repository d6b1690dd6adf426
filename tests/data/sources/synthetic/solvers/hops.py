"""Solves multi-hop questions by following a map from each thing to the next."""

from itertools import pairwise

from unspool.data.sources.synthetic.draft import LABEL, NAME
from unspool.data.sources.synthetic.hops import THEMES, VARIABLE, Theme

from .reading import (
    Solution,
    UnsolvableError,
    find_facts,
    read_parts,
    read_question,
    unknown,
)

_THINGS = {"staff": NAME, "roads": NAME, "boxes": LABEL, "variables": VARIABLE}


class Ways(dict[str, tuple[str, int]]):
    """The link from each thing to the next, and its position in the text."""

    def walk(self, start: str, hops: int) -> Solution:
        places = []
        for _ in range(hops):
            if start not in self:
                raise UnsolvableError(f"nothing leads on from {start}")
            start, place = self[start]
            places.append(place)
        return Solution(start, places)


def solve(text: str) -> list[Solution]:
    context, questions, _ = read_parts(text)
    for name, theme in THEMES.items():
        thing = _THINGS[name]
        facts = find_facts(context, theme.facts, a=thing, b=f"{thing}|[0-9]+" if theme.value else thing)
        if facts:
            links = [(match["a"], match["b"], match.start()) for match in facts]
            onward = _ways(links)
            backward = _ways([(b, a, place) for a, b, place in links])
            return [_answer(question, theme, thing, onward, backward) for question in questions]
    raise UnsolvableError("there are no facts")


def _ways(links: list[tuple[str, str, int]]) -> Ways:
    ways = Ways({a: (b, place) for a, b, place in links})
    if len(ways) < len(links):
        twice = next(a for a, b in pairwise(sorted(a for a, _, _ in links)) if a == b)
        raise UnsolvableError(f"{twice} stands in two facts that contradict each other")
    return ways


def _answer(question: str, theme: Theme, thing: str, onward: Ways, backward: Ways) -> Solution:
    slots = {"start": thing, "end": thing, "hops": "[0-9]+", "nested": f"(?:{theme.nested})+"}
    if asked := read_question(question, theme.reach, **slots):
        hops = int(asked["hops"]) if "hops" in asked else asked["nested"].count(theme.nested)
        return onward.walk(asked["start"], hops)
    if asked := read_question(question, theme.back, **slots):
        return backward.walk(asked["end"], int(asked["hops"]))
    if asked := read_question(question, theme.distance, **slots):
        return _distance(asked["start"], asked["end"], onward)
    if asked := read_question(question, theme.value, **slots):
        return _value(asked["start"], onward)
    raise unknown(question)


def _distance(start: str, end: str, onward: Ways) -> Solution:
    places: list[int] = []
    at = start
    while at != end:
        if at not in onward or len(places) > len(onward):
            raise UnsolvableError(f"no way leads from {start} to {end}")
        at, place = onward[at]
        places.append(place)
    return Solution(str(len(places)), places)


def _value(start: str, onward: Ways) -> Solution:
    places: list[int] = []
    at = start
    while not at.isdigit():
        if at not in onward or len(places) > len(onward):
            raise UnsolvableError(f"{start} has no value")
        at, place = onward[at]
        places.append(place)
    return Solution(at, places)
