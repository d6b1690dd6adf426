"""Multi-hop reasoning: scattered facts that each link two things, and questions that follow several links.

Topics: who reports to whom, which box holds the key to which, which town follows which, which variable equals which.
Each thing has at most one link to and one from another thing, so there is one right answer.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from unspool.data.sources.synthetic.draft import (
    LABEL,
    NAME,
    Builder,
    Draft,
    Question,
    labels,
    lines_like,
    names,
    numbers,
    pick,
    pick_each,
)

MOST_HOPS = 5
# Things per chain: enough for the longest question, and for shorter ones that start in the middle.
CHAIN = (3, 9)


class Theme(NamedTuple):
    openings: tuple[str, ...]
    facts: tuple[str, ...]
    reach: tuple[str, ...]  # with {start} and {hops}, or with {nested}: `nested` repeated per hop
    nested: str = ""
    back: tuple[str, ...] = ()
    distance: tuple[str, ...] = ()
    value: tuple[str, ...] = ()  # questions for the number at the end of a chain


THEMES = {
    "staff": Theme(
        openings=(
            "Notes on who works for whom.",
            "The company has many managers; these are its lines of command.",
            "From the records of a large office:",
        ),
        facts=("{a} reports to {b}.", "The manager of {a} is {b}.", "{b} is the direct manager of {a}."),
        reach=(
            "Who stands {hops} levels above {start}?",
            "Going up {hops} levels from {start}, whom do you reach?",
            "Who is {nested}{start}?",
        ),
        nested="the manager of ",
        back=("Who stands {hops} levels below {end}?", "Going down {hops} levels from {end}, whom do you reach?"),
        distance=("How many levels is {end} above {start}?", "Going up from {start}, how many levels is it to {end}?"),
    ),
    "boxes": Theme(
        openings=(
            "Every box is locked, and its key lies in another one.",
            "An inventory of boxes and of the keys in them:",
            "What lies in which box was noted here.",
        ),
        facts=(
            "The {a} box holds the key to the {b} box.",
            "In the {a} box lies the key to the {b} box.",
            "The key to the {b} box is kept in the {a} box.",
        ),
        reach=(
            "Beginning with the key in the {start} box and always taking the next one, what does key {hops} open?",
            "Which box is opened after {hops} keys, beginning with the key in the {start} box?",
            "Which is {nested}the {start} box?",
        ),
        nested="the box opened by the key from ",
        back=("Which box must be open first if the {end} box is to be reached with {hops} keys?",),
        distance=("How many keys lead from the {start} box to the {end} box?",),
    ),
    "roads": Theme(
        openings=(
            "A traveller's notes on the towns and the roads between them.",
            "The coach stops in many towns, always in the same order.",
            "These roads can be used in one direction only.",
        ),
        facts=(
            "From {a} the road leads to {b}.",
            "The next stop after {a} is {b}.",
            "Whoever leaves {a} arrives in {b}.",
        ),
        reach=(
            "Leaving {start}, which town is reached after {hops} stops?",
            "Where does a journey of {hops} roads end that begins in {start}?",
            "What is {nested}{start}?",
        ),
        nested="the stop after ",
        back=("In which town does a journey of {hops} roads begin that ends in {end}?",),
        distance=("How many roads lead from {start} to {end}?", "After how many stops is {end} reached from {start}?"),
    ),
    "variables": Theme(
        openings=(
            "A program assigns these values; the order of the lines does not matter.",
            "Each line below holds at the same time.",
            "Definitions, in no particular order:",
        ),
        facts=("{a} = {b}", "let {a} be {b}", "{a} is defined as {b}"),
        reach=(),
        value=(
            "What is the value of {start}?",
            "Which number does {start} stand for?",
            "Replace names by what they are defined as until a number is left: what is {start}?",
        ),
    ),
}
VARIABLE = r"[a-z]+(?:_[a-z]+)+"
_ANY = f"{NAME}|{LABEL}|{VARIABLE}"
LINE = lines_like([wording for theme in THEMES.values() for wording in theme.facts], a=_ANY, b=f"{_ANY}|[0-9]+")


def choose(style: np.random.Generator) -> Builder:
    name = pick(style, list(THEMES))
    return partial(_build, name, pick(style, THEMES[name].openings))


def _build(name: str, opening: str, rng: np.random.Generator, num: int) -> Draft:
    theme = THEMES[name]
    lens = _chain_lens(rng, num)
    things = _things(name, rng, sum(lens))
    ends = np.cumsum(lens).tolist()
    chains = [things[end - size : end] for end, size in zip(ends, lens, strict=True)]
    if theme.value:
        last = map(str, numbers(rng, len(chains)).tolist())
        chains = [[*chain[:-1], value] for chain, value in zip(chains, last, strict=True)]
    links = [link for chain in chains for link in pairwise(chain)]
    wordings = pick_each(rng, theme.facts, len(links))
    facts = [wordings[at].format(a=links[at][0], b=links[at][1]) for at in rng.permutation(len(links)).tolist()]
    return Draft(opening, facts, _questions(theme, chains, rng))


def _chain_lens(rng: np.random.Generator, num: int) -> list[int]:
    """Draw lengths of chains with `num` links in total; the last chain may be longer than the others."""
    lens = rng.integers(CHAIN[0], CHAIN[1] + 1, size=num // (CHAIN[0] - 1) + 1)
    count = int(np.searchsorted(np.cumsum(lens - 1), num, side="right"))
    kept: list[int] = lens[: max(1, count)].tolist()
    kept[-1] += num - sum(kept) + len(kept)
    return kept


def _things(name: str, rng: np.random.Generator, count: int) -> list[str]:
    if name in ("staff", "roads"):
        return names(rng, count)
    return labels(rng, count, "_" if name == "variables" else "-")


def _questions(theme: Theme, chains: list[list[str]], rng: np.random.Generator) -> Iterator[Question]:
    while True:
        chain = chains[int(rng.integers(len(chains)))]
        hops = int(rng.integers(2, min(MOST_HOPS, len(chain) - 1) + 1))
        if theme.value:
            yield Question(pick(rng, theme.value).format(start=chain[-1 - hops]), chain[-1])
            continue
        first = int(rng.integers(len(chain) - hops))
        start, end = chain[first], chain[first + hops]
        form = rng.integers(4)
        if form < 2:
            text = pick(rng, theme.reach).format(start=start, hops=hops, nested=theme.nested * hops)
            yield Question(text, end)
        elif form == 2:
            yield Question(pick(rng, theme.back).format(end=end, hops=hops), start)
        else:
            yield Question(pick(rng, theme.distance).format(start=start, end=end), str(hops))
