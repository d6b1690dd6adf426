"""What a check gives back, and what becomes of it in the table.

A check is a pure function of a `Case`; it returns one `Measured` for each quantity it looked at.
Elsewhere: the list of checks (checks.py), running them (run.py), printing them (the command line).
"""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unspool.verify.case import Case

Status = Literal["passed", "failed", "skipped"]
# As Python prints an error, and torch where there are ranks.
_ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Exit|Interrupt): .*)")


class SkippedError(Exception):
    """Raised by a check that has nothing to check on this model or machine; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    quantity: str  # loss | gradient | logits | …
    error: float
    tolerance: float
    detail: str = ""  # where the error was largest

    @property
    def passed(self) -> bool:
        # Written so that an error which is not a number fails.
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    promise: int
    what: str  # one line for --list
    measure: Callable[[Case], list[Measured]]
    once: bool = False  # says nothing about the model, so one is enough


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table. `error` and `tolerance` are None where nothing could be measured."""

    promise: int
    check: str
    quantity: str
    model: str
    device: str
    dtype: str
    error: float | None
    tolerance: float | None
    status: Status
    seconds: float  # of the whole check, which may have measured several quantities
    detail: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def error_line(said: str) -> str:
    """Of what a process said before it failed, the line that names the error, else the last one.

    CUDA's errors go on for some lines with what to try, and libraries may have a word after them.
    """
    lines = said.strip().splitlines()
    named = [found[1] for line in lines if (found := _ERROR.match(line))]
    return (named or lines or [""])[-1]
