"""Attribute inclusion: things with sets of attributes, and questions about which, how many, or whether.

Things differ in name, and lists follow the order of the document, so there is one right answer. Half of the yes-or-no
questions have the answer yes.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from unspool.data.sources.synthetic.draft import (
    LABEL,
    NAME,
    WORD,
    Builder,
    Draft,
    Question,
    labels,
    lines_like,
    names,
    pick,
    shuffled_words,
)

ATTRIBUTES = (12, 40)  # number of attributes to choose from
MEAN_ATTRIBUTES = 4.0
# Questions for a list of all matches have at most this many.
MOST_LISTED = 8
NONE = "none"

OPENINGS = (
    "The members of a club and what they like.",
    "A catalogue of things and of the marks that each of them bears.",
    "Read which marks belong to whom.",
    "Everything below is described by a few marks.",
    "What each of them is known for was written down here.",
    "Marks, as far as they are known:",
)
FACTS = (
    "{thing}: {marks}",
    "{thing} has the marks {marks}.",
    "The marks of {thing} are {marks}.",
    "{thing} is marked {marks}.",
    "{thing} ({marks})",
    "To {thing} belong {marks}.",
)
# {marks} joined by " and " or " or ", as the question needs.
HAS_ALL = (
    "Who has {marks}? Name all in the order in which they are listed.",
    "List, in the order of the text, everything marked {marks}.",
    "Which ones bear {marks} together? Keep the order of the text.",
)
HAS_ALL_BUT = (
    "Who has {marks} but not {other}? Name all in the order in which they are listed.",
    "Leaving out everything with {other}, list in the order of the text what is marked {marks}.",
)
COUNT_ALL = ("How many have {marks}?", "Count those that are marked {marks}.", "How often do {marks} occur together?")
COUNT_ANY = ("How many have at least one of {marks}?", "Count those that bear any of {marks}.")
INCLUDES = (
    "Is {mark} among the marks of {thing}?",
    "Does {thing} have {mark}?",
    "Yes or no: {thing} bears {mark}.",
)
THING = f"{NAME}|{LABEL}"
MARKS = f"{WORD}(?:, {WORD})*"
LINE = lines_like(FACTS, thing=THING, marks=MARKS)


def choose(style: np.random.Generator) -> Builder:
    size = int(style.integers(ATTRIBUTES[0], ATTRIBUTES[1] + 1))
    marks = shuffled_words(style)[:size]
    return partial(_build, marks, style.random() < 0.5, pick(style, OPENINGS), pick(style, FACTS))


def _build(marks: list[str], people: bool, opening: str, wording: str, rng: np.random.Generator, num: int) -> Draft:
    size = len(marks)
    things = (names if people else labels)(rng, num)
    has = rng.random((num, size)) < MEAN_ATTRIBUTES / size
    has[np.arange(num), rng.integers(size, size=num)] = True  # at least one
    columns = np.nonzero(has)[1]
    ends = np.cumsum(has.sum(axis=1)).tolist()
    spelled = [marks[at] for at in columns.tolist()]
    starts = [0, *ends[:-1]]
    facts = [
        wording.format(thing=thing, marks=", ".join(spelled[start:end]))
        for thing, start, end in zip(things, starts, ends, strict=True)
    ]
    return Draft(opening, facts, _questions(things, marks, has, rng))


def _questions(things: list[str], marks: list[str], has: np.ndarray, rng: np.random.Generator) -> Iterator[Question]:
    while True:
        thing = int(rng.integers(len(things)))
        form = rng.integers(6)
        if form < 2:
            wanted = rng.random() < 0.5
            choices = np.flatnonzero(has[thing] == wanted)
            if len(choices):
                text = pick(rng, INCLUDES).format(thing=things[thing], mark=marks[int(rng.choice(choices))])
                yield Question(text, "yes" if wanted else "no")
            continue
        # Usually attributes of one thing, so that at least one thing has all of them; sometimes any attributes.
        pool = np.flatnonzero(has[thing]) if rng.random() < 0.9 else np.arange(len(marks))
        chosen = rng.permutation(pool)[: int(rng.integers(2, 5))]
        if len(chosen) < 2:
            continue
        both = " and ".join(marks[at] for at in chosen.tolist())
        matching = has[:, chosen].all(axis=1)
        if form == 2:
            yield Question(pick(rng, COUNT_ALL).format(marks=both), str(int(matching.sum())))
        elif form == 3:
            either = " or ".join(marks[at] for at in chosen[:2].tolist())
            count = int(has[:, chosen[:2]].any(axis=1).sum())
            yield Question(pick(rng, COUNT_ANY).format(marks=either), str(count))
        else:
            text = pick(rng, HAS_ALL).format(marks=both)
            if form == 5:
                other = int(rng.integers(len(marks)))
                if other in chosen:
                    continue
                matching = matching & ~has[:, other]
                text = pick(rng, HAS_ALL_BUT).format(marks=both, other=marks[other])
            if matching.sum() <= MOST_LISTED:
                listed = [things[at] for at in np.flatnonzero(matching).tolist()]
                yield Question(text, ", ".join(listed) or NONE)
