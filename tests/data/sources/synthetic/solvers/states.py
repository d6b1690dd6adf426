"""Solves state tracking backwards: from the moment in question to the change that decides it."""

from collections.abc import Iterable
from typing import NamedTuple

from unspool.data.sources.synthetic.draft import LABEL, NAME, WORD
from unspool.data.sources.synthetic.states import (
    COUNTER_AFTER,
    COUNTER_FINAL,
    COUNTER_TIMES,
    LOWERS,
    MOVES,
    PREFIXES,
    RAISES,
    SETS,
    STEPS,
    Theme,
)

from .reading import (
    Solution,
    UnsolvableError,
    find_facts,
    read_parts,
    read_question,
    unknown,
)

_THINGS = {"people": NAME, "boxes": LABEL, "doors": LABEL}


class Change(NamedTuple):
    step: int
    thing: str
    kind: str  # "set", "add" or "take"
    value: str
    place: int


def solve(text: str) -> list[Solution]:
    context, questions, _ = read_parts(text)
    prefix = max(PREFIXES, key=lambda prefix: len(find_facts(context, [prefix + "{rest}"], **STEPS, rest=".*")))
    for name, theme in MOVES.items():
        changes = _changes(context, prefix, theme.facts, "set", thing=_THINGS[name], state=WORD)
        if changes:
            history = _history(changes)
            return [_move_answer(question, theme, _THINGS[name], history) for question in questions]
    kinds = {"set": SETS, "add": RAISES, "take": LOWERS}
    history = _history(
        change
        for kind, said in kinds.items()
        for change in _changes(context, prefix, said, kind, thing=LABEL, value="[0-9]+")
    )
    return [_counter_answer(question, history) for question in questions]


def _changes(context: str, prefix: str, facts: tuple[str, ...], kind: str, **slots: str) -> list[Change]:
    found = find_facts(context, [prefix + fact for fact in facts], **STEPS, **slots)
    value = "state" if "state" in slots else "value"
    return [Change(int(match["step"]), match["thing"], kind, match[value], match.start()) for match in found]


def _history(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """The changes of each thing, the latest first."""
    ordered = sorted(changes, key=lambda change: change.step, reverse=True)
    if [change.step for change in ordered] != list(range(len(ordered), 0, -1)):
        raise UnsolvableError("the steps are not numbered from 1 on")
    history: dict[str, list[Change]] = {}
    for change in ordered:
        history.setdefault(change.thing, []).append(change)
    return history


def _move_answer(question: str, theme: Theme, thing: str, history: dict[str, list[Change]]) -> Solution:
    slots = {"thing": thing, "state": WORD, "step": "[0-9]+"}
    asked = read_question(question, (*theme.final, *theme.after), **slots)
    if asked:
        latest = _before(history, asked)[0]
        return Solution(latest.value, [latest.place])
    if asked := read_question(question, theme.times, **slots):
        return _times(history, asked["thing"])
    inside = read_question(question, theme.who, **slots)
    counted = read_question(question, theme.how_many, **slots)
    asked = inside or counted
    if not asked:
        raise unknown(question)
    there = {name: changes[0].place for name, changes in history.items() if changes[0].value == asked["state"]}
    return Solution(", ".join(sorted(there)) if inside else str(len(there)), list(there.values()))


def _counter_answer(question: str, history: dict[str, list[Change]]) -> Solution:
    slots = {"thing": LABEL, "step": "[0-9]+"}
    asked = read_question(question, (*COUNTER_FINAL, *COUNTER_AFTER), **slots)
    if asked:
        total, places = 0, []
        for change in _before(history, asked):
            places.append(change.place)
            total += -int(change.value) if change.kind == "take" else int(change.value)
            if change.kind == "set":
                return Solution(str(total), places)
        raise UnsolvableError(f"{asked['thing']} is changed before it is set")
    if asked := read_question(question, COUNTER_TIMES, **slots):
        return _times(history, asked["thing"])
    raise unknown(question)


def _before(history: dict[str, list[Change]], asked: dict[str, str]) -> list[Change]:
    until = int(asked["step"]) if "step" in asked else None
    found = [change for change in history.get(asked["thing"], []) if until is None or change.step <= until]
    if not found:
        raise UnsolvableError(f"nothing is known of {asked['thing']}")
    return found


def _times(history: dict[str, list[Change]], thing: str) -> Solution:
    changes = history.get(thing, [])
    if not changes:
        raise UnsolvableError(f"nothing is known of {thing}")
    return Solution(str(len(changes)), [change.place for change in changes])
