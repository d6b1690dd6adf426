"""Results for reading: one line per check with the model that came nearest to failing, or a line per model.

In: `Result`s. Out: text. Promise: every failure has a line of its own, and so has every reason for skipping.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from unspool.verify.result import Result


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
