"""Sorting: a list in random order, and questions about positions in a stated order.

The list has numbers, words, dates or names with scores. Questions ask for the first few entries, the entry at a
position, the position of an entry, and in some documents the whole list. Entries differ, and every order states how to
break ties, so there is one right answer.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from unspool.data.sources.synthetic.draft import (
    LABEL,
    NAME,
    NUMBER,
    Builder,
    Draft,
    Question,
    labels,
    names,
    numbers,
    pick,
    to_pattern,
)

KINDS = ("numbers", "words", "dates", "scores")
WHOLE_SHARE = 0.25  # share of documents with a question about the whole list
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)

OPENINGS = (
    "The list below is in no particular order.",
    "Here is a list of entries as they came in, unsorted.",
    "Read the following entries. Questions about their order come afterwards.",
    "These entries were noted down one after another, in random order.",
    "An unsorted list follows.",
    "The entries of a register, in the order in which they were found:",
)
ENTRIES = ("- {entry}", "* {entry}", "{entry}", "({number}) {entry}", "Entry: {entry}", "Entry {number}: {entry}")
SCORED = "{name}: {score}"
# The wording of an order: (kind of entries, sort key, largest first). Ties: smallest first.
ORDERS = {
    "by value, smallest first": ("numbers", "value", False),
    "by value, largest first": ("numbers", "value", True),
    "from the smallest to the largest": ("numbers", "value", False),
    "by the sum of their digits, smallest sum first, equal sums by value": ("numbers", "digits", False),
    "in alphabetical order": ("words", "text", False),
    "in reverse alphabetical order": ("words", "text", True),
    "by length, shortest first, equal lengths in alphabetical order": ("words", "length", False),
    "by length, longest first, equal lengths in alphabetical order": ("words", "length", True),
    "by date, earliest first": ("dates", "date", False),
    "by date, latest first": ("dates", "date", True),
    "by day of the month, lowest first, equal days by date": ("dates", "day", False),
    "by score, lowest first": ("scores", "score", False),
    "by score, highest first": ("scores", "score", True),
    "by name, in alphabetical order": ("scores", "name", False),
}
FIRST = (
    "Which {count} entries come first when the list is sorted {order}?",
    "Sorted {order}, what are the first {count} entries?",
    "Put the entries in order {order} and give the first {count}.",
)
PLACE = (
    "Which entry stands at place {place} when the list is sorted {order}?",
    "Sorted {order}, what is entry number {place}?",
    "Put the entries in order {order} and give the one at place {place}.",
)
RANK = (
    "At which place does {entry} stand when the list is sorted {order}?",
    "Sorted {order}, what is the place of {entry}?",
    "Put the entries in order {order} and give the place of {entry}.",
)
ALL = (
    "Write out all entries, sorted {order}.",
    "What is the whole list, sorted {order}?",
    "Put the entries in order {order} and give all of them.",
)
DATE = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}|[0-9]{{1,2}} (?:{'|'.join(MONTHS)}) [0-9]{{4}}"
_PREFIX = "|".join(to_pattern(wording.removesuffix("{entry}"), {"number": NUMBER}, named=False) for wording in ENTRIES)
_SCORED = to_pattern(SCORED, {"name": NAME, "score": NUMBER})
_KINDS = f"(?P<numbers>[0-9]+)|(?P<words>{LABEL})|(?P<dates>{DATE})|(?P<scores>{_SCORED})"
LINE = re.compile(f"^(?:{_PREFIX})(?:{_KINDS})$", re.MULTILINE)


def choose(style: np.random.Generator) -> Builder:
    kind, opening, wording = pick(style, KINDS), pick(style, OPENINGS), pick(style, ENTRIES)
    return partial(_build, kind, opening, wording, style.random() < WHOLE_SHARE, style.random() < 0.5)


def _build(kind: str, opening: str, wording: str, whole: bool, iso: bool, rng: np.random.Generator, num: int) -> Draft:
    entries, shown, keys = _entries(kind, iso, rng, num)
    facts = [wording.format(number=number, entry=entry) for number, entry in enumerate(shown, start=1)]
    echo = sum(map(len, entries)) + 2 * num if whole else 0
    return Draft(opening, facts, _questions(kind, entries, keys, whole, rng), echo)


def _entries(
    kind: str, iso: bool, rng: np.random.Generator, num: int
) -> tuple[list[str], list[str], dict[str, Callable[[], np.ndarray]]]:
    """The entries as in answers, as in the list, and the sort keys; the first key breaks ties."""
    if kind == "words":
        entries = labels(rng, num)
        return (
            entries,
            entries,
            {
                "text": lambda: np.array(entries),
                "length": lambda: np.array([len(entry) for entry in entries]),
            },
        )
    if kind == "dates":
        days = np.datetime64("1800-01-01") + rng.choice(max(40_000, 3 * num), size=num, replace=False)
        dates = days.astype(object).tolist()
        entries = [date.isoformat() if iso else f"{date.day} {MONTHS[date.month - 1]} {date.year}" for date in dates]
        return entries, entries, {"date": lambda: days, "day": lambda: np.array([date.day for date in dates])}
    values = numbers(rng, num)
    if kind == "numbers":
        entries = list(map(str, values.tolist()))
        return (
            entries,
            entries,
            {
                "value": lambda: values,
                "digits": lambda: np.array([sum(map(int, entry)) for entry in entries]),
            },
        )
    entries = names(rng, num)
    shown = [SCORED.format(name=name, score=score) for name, score in zip(entries, values.tolist(), strict=True)]
    return entries, shown, {"score": lambda: values, "name": lambda: np.array(entries)}


def _questions(
    kind: str, entries: list[str], keys: dict[str, Callable[[], np.ndarray]], whole: bool, rng: np.random.Generator
) -> Iterator[Question]:
    orders = {chosen: (key, down) for chosen, (of, key, down) in ORDERS.items() if of == kind}
    sorted_by: dict[str, np.ndarray] = {}
    tie = np.argsort(np.argsort(next(iter(keys.values()))()))
    while True:
        chosen = pick(rng, list(orders))
        if chosen not in sorted_by:
            key, down = orders[chosen]
            # Both keys as ranks, so that one of them can be reversed without changing its ties.
            rank = np.unique(keys[key](), return_inverse=True)[1]
            sorted_by[chosen] = np.lexsort((tie, -rank if down else rank))
        order = sorted_by[chosen]
        form = rng.integers(5)
        if whole:
            whole = False
            yield Question(pick(rng, ALL).format(order=chosen), ", ".join(entries[at] for at in order.tolist()))
        elif form == 0:
            count = int(rng.integers(2, 8))
            first = ", ".join(entries[at] for at in order[:count].tolist())
            yield Question(pick(rng, FIRST).format(order=chosen, count=count), first)
        elif form < 3:
            place = int(rng.integers(len(entries)))
            yield Question(pick(rng, PLACE).format(order=chosen, place=place + 1), entries[order[place]])
        else:
            place = int(rng.integers(len(entries)))
            yield Question(pick(rng, RANK).format(order=chosen, entry=entries[order[place]]), str(place + 1))
