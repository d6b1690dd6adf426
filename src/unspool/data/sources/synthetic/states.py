"""State tracking: numbered steps that change things, and questions about the state at the end or after a step.

People walk between rooms, things move between boxes, doors are opened, closed and locked, counters are set, raised and
lowered. A step always changes the state that it names. The last change of a thing in question is equally likely
anywhere in the document.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from unspool.data.sources.synthetic.draft import (
    Builder,
    Draft,
    Question,
    labels,
    lines_like,
    names,
    pick,
    pick_each,
    shuffled_words,
)

# Mean steps per thing; with more, hardly any thing would have an early last change.
STEPS_EACH = 2
# Questions for a list of all things in one state have at most this many.
MOST_LISTED = 6

PREFIXES = ("Step {step}: ", "{step}) ", "[{step}] ", "After step {last}, step {step}: ", "#{step} ")
OPENINGS = (
    "A log of what happened, step by step.",
    "Follow the steps below; questions about them come at the end.",
    "The steps are numbered in the order in which they happened.",
    "What happened is told here in order, one step to a line.",
    "Keep track of everything that changes in these steps.",
    "The following steps were taken one after another.",
)


class Theme(NamedTuple):
    states: int  # number of states to choose from; 0: those of `FIXED`
    facts: tuple[str, ...]
    final: tuple[str, ...]
    after: tuple[str, ...]
    times: tuple[str, ...]
    who: tuple[str, ...]
    how_many: tuple[str, ...]


MOVES = {
    "people": Theme(
        states=12,
        facts=(
            "{thing} walks into the {state} room.",
            "{thing} goes to the {state} room.",
            "The {state} room is entered by {thing}.",
        ),
        final=("In which room is {thing} at the end?", "Where does {thing} stay after the last step?"),
        after=("In which room is {thing} after step {step}?", "Step {step} has just happened: where is {thing}?"),
        times=("How many times does {thing} enter a room?",),
        who=(
            "Who is in the {state} room at the end?",
            "Name everybody who is in the {state} room after the last step.",
        ),
        how_many=("How many people are in the {state} room at the end?",),
    ),
    "boxes": Theme(
        states=16,
        facts=(
            "The {thing} is put into the {state} box.",
            "Somebody moves the {thing} to the {state} box.",
            "The {state} box receives the {thing}.",
        ),
        final=("Which box holds the {thing} at the end?", "Where is the {thing} found after the last step?"),
        after=("Which box holds the {thing} after step {step}?", "Step {step} is done: which box is the {thing} in?"),
        times=("In how many steps is the {thing} put somewhere?",),
        who=("What does the {state} box hold at the end?", "List the things in the {state} box after the last step."),
        how_many=("How many things does the {state} box hold at the end?",),
    ),
    "doors": Theme(
        states=0,
        facts=(
            "The {thing} door is now {state}.",
            "Somebody leaves the {thing} door {state}.",
            "From here on the {thing} door is {state}.",
        ),
        final=("Is the {thing} door open, closed or locked at the end?", "How is the {thing} door left?"),
        after=("How is the {thing} door after step {step}?", "Step {step} is done: how does the {thing} door stand?"),
        times=("How many times does the {thing} door change?",),
        who=("Which doors are {state} at the end?",),
        how_many=("How many doors are {state} at the end?", "After the last step, how many doors are {state}?"),
    ),
}
FIXED = ("open", "closed", "locked")

SETS = ("{thing} is set to {value}.", "{thing} becomes {value}.", "Write {value} into {thing}.")
RAISES = ("{thing} is increased by {value}.", "Add {value} to {thing}.", "{thing} grows by {value}.")
LOWERS = ("{thing} is decreased by {value}.", "Take {value} from {thing}.", "{thing} shrinks by {value}.")
COUNTER_FINAL = ("What is the value of {thing} at the end?", "Which number does {thing} hold after the last step?")
COUNTER_AFTER = ("What is the value of {thing} after step {step}?", "Step {step} is done: what is {thing}?")
COUNTER_TIMES = ("How many steps change {thing}?", "In how many steps is {thing} written to?")
STEPS = {"step": "[0-9]+", "last": "[0-9]+"}
LINE = lines_like([prefix + "{rest}" for prefix in PREFIXES], **STEPS, rest=".*")


def choose(style: np.random.Generator) -> Builder:
    theme, prefix, opening = pick(style, [*MOVES, "counters"]), pick(style, PREFIXES), pick(style, OPENINGS)
    if theme == "counters":
        return partial(_counters, prefix, opening)
    states = shuffled_words(style)[: MOVES[theme].states] or list(FIXED)
    return partial(_moves, theme, states, prefix, opening)


class Log(NamedTuple):
    """The thing that changes in each step, and its state after the step."""

    things: list[str]
    who: np.ndarray
    states: list[str]


def _moves(name: str, kinds: list[str], prefix: str, opening: str, rng: np.random.Generator, num: int) -> Draft:
    theme = MOVES[name]
    who, things = _who(name, rng, num)
    # Never 0 between two steps of the same thing, so that every step changes something.
    shifts = np.empty(num, dtype=np.int64)
    shifts[np.argsort(who, kind="stable")] = np.cumsum(rng.integers(1, len(kinds), size=num))
    states = [kinds[at] for at in (shifts % len(kinds)).tolist()]
    wordings = pick_each(rng, theme.facts, num)
    facts = [
        prefix.format(step=at + 1, last=at) + wordings[at].format(thing=things[thing], state=states[at])
        for at, thing in enumerate(who.tolist())
    ]
    return Draft(opening, facts, _move_questions(theme, Log(things, who, states), rng))


def _counters(prefix: str, opening: str, rng: np.random.Generator, num: int) -> Draft:
    who, things = _who("counters", rng, num)
    amounts, forms = rng.integers(1, 100, size=num).tolist(), rng.integers(5, size=num).tolist()
    picks = rng.integers(3, size=num).tolist()
    values: dict[int, int] = {}
    states, facts = [], []
    for at, thing in enumerate(who.tolist()):
        value, form = amounts[at], forms[at]
        old = values.get(thing)
        if old is None or (form == 0 and value != old):
            wording, values[thing] = SETS, value
        elif form < 3:
            wording, values[thing] = RAISES, old + value
        else:
            wording, values[thing] = LOWERS, old - value
        states.append(str(values[thing]))
        facts.append(prefix.format(step=at + 1, last=at) + wording[picks[at]].format(thing=things[thing], value=value))
    return Draft(opening, facts, _counter_questions(Log(things, who, states), rng))


def _who(name: str, rng: np.random.Generator, num: int) -> tuple[np.ndarray, list[str]]:
    """Draw the thing that changes in each step, and the names of the things."""
    count = max(3, num // STEPS_EACH)
    make = names if name == "people" else labels
    return rng.integers(count, size=num), make(rng, count)


def _move_questions(theme: Theme, log: Log, rng: np.random.Generator) -> Iterator[Question]:
    last = _last_steps(log.who)
    inside: dict[str, list[str]] = {}
    for thing, step in zip(*last, strict=True):
        inside.setdefault(log.states[step], []).append(log.things[thing])
    singles = _single_questions(log, theme.final, theme.after, theme.times, rng)
    while True:
        state = pick(rng, list(inside))
        form = rng.integers(10)
        if form == 0 and len(inside[state]) <= MOST_LISTED:
            yield Question(pick(rng, theme.who).format(state=state), ", ".join(sorted(inside[state])))
        elif form == 1:
            yield Question(pick(rng, theme.how_many).format(state=state), str(len(inside[state])))
        else:
            yield next(singles)


def _counter_questions(log: Log, rng: np.random.Generator) -> Iterator[Question]:
    return _single_questions(log, COUNTER_FINAL, COUNTER_AFTER, COUNTER_TIMES, rng)


def _single_questions(
    log: Log, final: tuple[str, ...], after: tuple[str, ...], times: tuple[str, ...], rng: np.random.Generator
) -> Iterator[Question]:
    """Yield questions about one thing: its state at the end or after a step, or its number of changes."""
    things, steps = _last_steps(log.who)
    by_step = np.argsort(steps)
    things, steps = things[by_step], steps[by_step]
    counts = np.bincount(log.who)
    num = len(log.who)
    while True:
        form = rng.random()
        if form < 0.5:
            # Drawn by step instead of by thing, because most things change again late.
            near = int(np.abs(steps - rng.integers(num)).argmin())
            thing = log.things[things[near]]
            yield Question(pick(rng, final).format(thing=thing), log.states[steps[near]])
        elif form < 0.9:
            at = int(rng.integers(num))
            # This state holds until the next change of the same thing, or the end.
            later = np.flatnonzero(log.who[at + 1 :] == log.who[at])
            until = at + 1 + int(later[0]) if len(later) else num
            asked = int(rng.integers(at, until)) + 1
            text = pick(rng, after).format(thing=log.things[log.who[at]], step=asked)
            yield Question(text, log.states[at])
        else:
            thing_at = int(rng.choice(things))
            yield Question(pick(rng, times).format(thing=log.things[thing_at]), str(counts[thing_at]))


def _last_steps(who: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the things that change, and the last step of each."""
    things, from_end = np.unique(who[::-1], return_index=True)
    return things, len(who) - 1 - from_end
