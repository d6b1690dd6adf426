"""Do two backends give the same answers? Asked on a few prompts, compared letter by letter.

Greedy answers of one model should be equal whatever computes them; where they are not, scores from different
backends are not comparable. A few late differences come from rounding, early ones from another template or tokens.
"""

from dataclasses import dataclass
from typing import Any

from unspool.eval.backend import Backend
from unspool.eval.config import LossEval
from unspool.eval.plan import Plan

PROMPTS = 20
_AROUND = 24


@dataclass(frozen=True, kw_only=True)
class Difference:
    name: str
    """Suite, task and length."""
    index: int
    at: int
    """The first character that differs."""
    first: str
    second: str


@dataclass(frozen=True, kw_only=True)
class Parity:
    n: int
    differences: list[Difference]

    @property
    def equal(self) -> int:
        return self.n - len(self.differences)

    def as_json(self) -> dict[str, Any]:
        return {"n": self.n, "equal": self.equal, "differences": [vars(one) for one in self.differences]}


def compare(plan: Plan, first: Backend, second: Backend, *, count: int = PROMPTS) -> Parity:
    """Answers of both to the same prompts, spread over everything that is planned."""
    units = [unit for unit in plan.units if not isinstance(unit.config, LossEval)]
    step = max(1, len(units) // count)
    differences: list[Difference] = []
    n = 0
    for unit in units[::step][:count]:
        prompt = plan.prompt(unit)
        for at, (one, other) in enumerate(zip(first.answers(prompt), second.answers(prompt), strict=True)):
            n += 1
            if one != other:
                differences.append(_difference(unit.name, unit.index + at, one, other))
            if n == count:
                return Parity(n=n, differences=differences)
    return Parity(n=n, differences=differences)


def _difference(name: str, index: int, one: str, other: str) -> Difference:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    part = slice(max(0, same - _AROUND), same + _AROUND)
    return Difference(name=name, index=index, at=same, first=one[part], second=other[part])
