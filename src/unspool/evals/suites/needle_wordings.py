"""Wordings of needles: templates of facts and questions.

Use the held-out half only for final results. Do not use it to develop a method or in training data. A model trained on
a wording scores higher on it, so a test with that wording measures the training data.
"""

from dataclasses import dataclass

from unspool.data.facts import fact, split_question


@dataclass(frozen=True)
class NeedleWording:
    """Templates with the fields {kind} ("number" or "word"), {key} and {value}."""

    statement: str
    question: str
    prefix: str
    """Start of the answer. The value follows after a space."""
    heldout: bool = False

    def state(self, key: str, value: str, kind: str) -> str:
        return self.statement.format(key=key, value=value, kind=kind)

    def ask(self, key: str, kind: str) -> tuple[str, str]:
        """Return (question, start of the answer)."""
        return self.question.format(key=key, kind=kind), self.prefix.format(key=key, kind=kind)


_QUESTION, _PREFIX = split_question("{key}", "{kind}")

WORDINGS: dict[str, NeedleWording] = {
    # The wording of RULER and of sources of kind `recall`.
    "magic": NeedleWording(fact("{key}", "{value}", "{kind}"), _QUESTION, _PREFIX),
    "record": NeedleWording(
        "In the old records, {key} is listed under the {kind} {value}.",
        "Under which {kind} do the old records list {key}?",
        " The old records list {key} under the {kind}",
    ),
    "parcel": NeedleWording(
        "Anyone who says {value} at the counter receives the parcel for {key}.",
        "What must a person say at the counter to receive the parcel for {key}?",
        " To receive the parcel for {key}, a person must say",
    ),
    "locker": NeedleWording(
        "Locker {value} was given to the guest called {key}.",
        "Which locker was given to the guest called {key}?",
        " The guest called {key} was given locker",
        heldout=True,
    ),
    "password": NeedleWording(
        "Only the gardener knows that {value} opens the gate of {key}.",
        "What opens the gate of {key}?",
        " The gate of {key} is opened by",
        heldout=True,
    ),
    "ship": NeedleWording(
        "On the harbor list, the ship {key} carries the mark {value}.",
        "Which mark does the ship {key} carry on the harbor list?",
        " On the harbor list, the mark of the ship {key} is",
        heldout=True,
    ),
}

# Sets of wordings that `wordings` accepts.
WORDING_SETS: dict[str, tuple[str, ...]] = {
    "development": tuple(name for name, wording in WORDINGS.items() if not wording.heldout),
    "heldout": tuple(name for name, wording in WORDINGS.items() if wording.heldout),
    "all": tuple(WORDINGS),
}


def expand_wordings(names: list[str]) -> list[str]:
    """Replace names of sets by their wordings. Raises ValueError for an unknown name."""
    found: list[str] = []
    for name in names:
        if name not in WORDINGS and name not in WORDING_SETS:
            known = ", ".join([*WORDING_SETS, *WORDINGS])
            raise ValueError(f"wording {name!r} is not known; known: {known}")
        found += WORDING_SETS.get(name, (name,))
    return list(dict.fromkeys(found))
