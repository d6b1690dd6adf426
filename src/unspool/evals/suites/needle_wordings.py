"""Wordings of needles: templates of facts and questions.

Use the two held-out sets only for final results. Do not use them to develop a method or in training data. A model
trained on a wording scores higher on it, so a test with that wording measures the training data.
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
    set: str = "development"

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
        set="heldout",
    ),
    "password": NeedleWording(
        "Only the gardener knows that {value} opens the gate of {key}.",
        "What opens the gate of {key}?",
        " The gate of {key} is opened by",
        set="heldout",
    ),
    "ship": NeedleWording(
        "On the harbor list, the ship {key} carries the mark {value}.",
        "Which mark does the ship {key} carry on the harbor list?",
        " On the harbor list, the mark of the ship {key} is",
        set="heldout",
    ),
    # SmolLM2-135M answers these three at short lengths, unlike those of the first held-out set.
    "patent": NeedleWording(
        "The patent that {key} was granted has the {kind} {value}.",
        "Which {kind} has the patent that {key} was granted?",
        " {key} was granted the patent with the {kind}",
        set="heldout-2",
    ),
    "horse": NeedleWording(
        "At the races, the horse {key} ran with the {kind} {value}.",
        "With which {kind} did the horse {key} run at the races?",
        " The horse {key} ran at the races with the {kind}",
        set="heldout-2",
    ),
    "museum": NeedleWording(
        "The museum keeps the coin of {key} as item {value}.",
        "As which item does the museum keep the coin of {key}?",
        " The coin of {key} is kept in the museum as item",
        set="heldout-2",
    ),
}


def _set(*names: str) -> tuple[str, ...]:
    return tuple(name for name, wording in WORDINGS.items() if wording.set in names)


# Sets of wordings that `wordings` accepts. The newer set is not in `all`, so that scores of `all` stay comparable.
WORDING_SETS: dict[str, tuple[str, ...]] = {
    "development": _set("development"),
    "heldout": _set("heldout"),
    "all": _set("development", "heldout"),
    "heldout-2": _set("heldout-2"),
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
