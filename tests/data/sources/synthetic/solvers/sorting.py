"""Solves sorting by reading entries as Python values and sorting those."""

import re
from collections.abc import Callable
from datetime import date
from typing import Any

from unspool.data.sources.synthetic.draft import LABEL, NAME, NUMBER
from unspool.data.sources.synthetic.sorting import ALL, DATE, FIRST, LINE, MONTHS, ORDERS, PLACE, RANK

from .reading import (
    Solution,
    UnsolvableError,
    read_parts,
    read_question,
    unknown,
)

_SLOTS = {
    "order": "|".join(map(re.escape, ORDERS)),
    "count": "[0-9]+",
    "place": "[0-9]+",
    "entry": f"{NUMBER}|{LABEL}|{DATE}|{NAME}",
}


def _date(text: str) -> date:
    try:
        if "-" in text:
            return date.fromisoformat(text)
        day, month, year = text.split()
        return date(int(year), MONTHS.index(month) + 1, int(day))
    except ValueError as error:
        raise UnsolvableError(f"{text} is no date: {error}") from None


# What an entry is compared by; `entry` is the text, `score` the number behind a name.
KEYS: dict[str, Callable[[str, str], Any]] = {
    "value": lambda entry, score: int(entry),
    "digits": lambda entry, score: (sum(int(digit) for digit in entry), int(entry)),
    "text": lambda entry, score: entry,
    "length": lambda entry, score: (len(entry), entry),
    "date": lambda entry, score: _date(entry),
    "day": lambda entry, score: (_date(entry).day, _date(entry)),
    "score": lambda entry, score: int(score),
    "name": lambda entry, score: entry,
}


def solve(text: str) -> list[Solution]:
    context, questions, _ = read_parts(text)
    entries: dict[str, dict[str, tuple[str, int]]] = {}
    for match in LINE.finditer(context):
        kind = next(kind for kind in ("numbers", "words", "dates", "scores") if match[kind])
        entry, score = (match["name"], match["score"]) if kind == "scores" else (match[kind], "")
        known = entries.setdefault(kind, {})
        if entry in known:
            raise UnsolvableError(f"{entry} is listed twice")
        known[entry] = (score, match.start())
    orders: dict[str, list[str]] = {}
    return [_answer(question, entries, orders) for question in questions]


def _answer(question: str, entries: dict[str, dict[str, tuple[str, int]]], orders: dict[str, list[str]]) -> Solution:
    for wordings in (FIRST, PLACE, RANK, ALL):
        asked = read_question(question, wordings, **_SLOTS)
        if asked is None:
            continue
        kind, _, _ = ORDERS[asked["order"]]
        known = entries.get(kind, {})
        ordered = _ordered(asked["order"], known, orders)
        if wordings is RANK:
            if asked["entry"] not in known:
                raise UnsolvableError(f"{asked['entry']} is not listed")
            return Solution(str(ordered.index(asked["entry"]) + 1), [known[asked["entry"]][1]])
        if wordings is ALL:
            chosen = ordered
        elif wordings is FIRST:
            chosen = ordered[: int(asked["count"])]
        else:
            chosen = ordered[int(asked["place"]) - 1 : int(asked["place"])]
        return Solution(", ".join(chosen), [known[entry][1] for entry in chosen])
    raise unknown(question)


def _ordered(said: str, known: dict[str, tuple[str, int]], orders: dict[str, list[str]]) -> list[str]:
    if said not in orders:
        _, key, down = ORDERS[said]
        ordered = sorted(known, key=lambda entry: KEYS[key](entry, known[entry][0]))
        if down and key == "length":
            # Ties stay as they are: sorting is stable.
            ordered = sorted(ordered, key=len, reverse=True)
        elif down:
            ordered.reverse()
        orders[said] = ordered
    return orders[said]
