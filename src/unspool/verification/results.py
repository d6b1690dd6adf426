"""What a check gives back, and what becomes of it in the table.

A check is a pure function of a `Case`; it returns one `Measured` for each quantity it looked at.
Elsewhere: the list of checks (checks.py), running them (run.py), printing them (the command line).
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from unspool.verification.case import Case

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


# Results for reading: one line per check with the model that came nearest to failing, or a line per model.


def table_rows(results: Sequence[Result], *, each: bool) -> list[tuple[str, ...]]:
    """Cells of the table; what passed is put together unless `each`, what failed never is."""
    groups: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.status == "skipped" and not each:
            continue
        alone = each or result.status == "failed"
        groups[result.check, result.quantity, result.device, result.model if alone else ""].append(result)
    rows = [_row(group) for group in groups.values()]
    return sorted(rows, key=lambda row: row[3])  # by device; checks stay in their order


def reasons(results: Iterable[Result]) -> list[str]:
    """Why something failed or was skipped, each reason once, with the models it holds for."""
    models: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.status != "passed" and result.detail:
            names = models[result.status, result.check, result.detail]
            if result.model not in names:
                names.append(result.model)
    together: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (status, check, detail), names in models.items():
        together[status, ", ".join(names), detail].append(check)
    return [
        f"{status}: {', '.join(checks)} on {names}: {detail}" for (status, names, detail), checks in together.items()
    ]


def closing(results: Sequence[Result]) -> str:
    counts = {status: sum(result.status == status for result in results) for status in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "nothing to check"


def _row(group: Sequence[Result]) -> tuple[str, ...]:
    shown = max(group, key=_nearness)
    checks = {(result.model, result.check): result.seconds for result in group}
    return (
        str(shown.promise),
        f"{shown.check} {shown.quantity}".strip(),
        shown.model,
        f"{shown.device} {shown.dtype}",
        _number(shown.error),
        _number(shown.tolerance),
        shown.status,
        f"{sum(checks.values()):.1f}",
    )


def _nearness(result: Result) -> float:
    """How much of its tolerance an error takes."""
    if result.error is None or result.tolerance is None or math.isnan(result.error):
        return math.inf
    if result.error == 0:
        return 0.0
    return result.error / result.tolerance if result.tolerance else math.inf


def _number(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"
