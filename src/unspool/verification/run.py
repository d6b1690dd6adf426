"""Run the checks and format their results."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch

from unspool.core.errors import ConfigError
from unspool.models.export import PlainProcess
from unspool.models.location import first_line
from unspool.verification import interruptions as runs
from unspool.verification import step_checks as steps
from unspool.verification.case import Case, Check, SkippedError, build_case, training_dtype
from unspool.verification.exported import check_export, check_rope_tables
from unspool.verification.fixtures import ModelSpec
from unspool.verification.fp8_products import check_fp8
from unspool.verification.memory_settings import check_chunked_loss, policy_checks
from unspool.verification.rank_layouts import RankGroup, rank_check

PROMISES = {
    1: "Packing changes neither a document's loss nor its gradient; perturbing one document changes no other.",
    2: "Loss and gradient of a step do not depend on micro-batches, row order or ranks.",
    3: "A run that is killed at any moment and resumed ends with the same weights.",
    4: "Exported checkpoints give the same logits in plain transformers.",
    5: "Chunked loss, activation checkpointing, offload and tiling change memory, not results.",
    6: "Products in FP8 are products of operands that are rounded once, in every pass.",
}


def build_checks(plain: PlainProcess, *, kills: int = runs.KILLS, ranks: RankGroup | None = None) -> dict[str, Check]:
    """All checks by name. `plain` loads exports, `kills` is the number of kills, `ranks` compute a step together."""
    checks = [
        Check("packing", 1, "loss and gradient of documents in a packed row vs. each alone", steps.check_packing),
        Check("isolation", 1, "replacing one document's tokens leaves the others bitwise equal", steps.check_isolation),
        Check("position-shift", 1, "a document at higher positions vs. at position 0", steps.check_position_shift),
        Check("micro-batches", 2, "eight rows in micro-batches of 1, 4 and 8", steps.check_micro_batches),
        Check("loss-weights", 2, "weighted labels in micro-batches of 1, 4 and 8 vs. a mask", steps.check_loss_weights),
        Check("row-order", 2, "one step with its rows in different orders", steps.check_row_order),
        *([rank_check(ranks)] if ranks else []),
        Check("resume", 3, "a stage interrupted several times vs. an uninterrupted stage", runs.check_resume),
        Check(
            "sigkill",
            3,
            "a process killed at random moments and restarted vs. an uninterrupted one",
            partial(runs.check_kills, kills=kills),
            once=True,
        ),
        Check("export", 4, "logits of the export, loaded without Unspool", partial(check_export, plain=plain)),
        Check("rope-tables", 4, "cosines and sines up to the last position vs. float64", check_rope_tables),
        Check("chunked-loss", 5, "chunked loss and gradients vs. all logits at once", check_chunked_loss),
        *policy_checks(),
        Check("fp8", 6, "products of `precision: fp8` vs. rounded operands in float64", check_fp8, once=True),
    ]
    return {check.name: check for check in checks}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One measured quantity. `error` and `tolerance` are None if nothing was measured."""

    promise: int
    check: str
    quantity: str
    model: str
    device: str
    dtype: str
    error: float | None
    tolerance: float | None
    status: Literal["passed", "failed", "skipped"]
    seconds: float  # of the whole check, which may measure several quantities
    detail: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def run_checks(
    specs: Sequence[ModelSpec], checks: Sequence[Check], *, device: torch.device, seed: int
) -> Iterator[list[Result]]:
    """Yield the results of one check on one model at a time. A model that cannot be loaded is skipped."""
    for spec in specs:
        began = time.perf_counter()
        try:
            case = build_case(spec, device=device, seed=seed)
        except ConfigError as error:
            yield from ([_result(check, spec, device, began, status="skipped", detail=str(error))] for check in checks)
            continue
        for check in checks:
            yield run_check(check, case)


def run_check(check: Check, case: Case) -> list[Result]:
    began = time.perf_counter()
    make = partial(_result, check, case.spec, case.device, began)
    try:
        measured = check.measure(case)
    except (SkippedError, ConfigError) as error:
        return [make(status="skipped", detail=str(error))]
    except RuntimeError as error:  # from torch, such as out of memory or a kernel that rejects its input
        return [make(status="failed", detail=first_line(error))]
    return [make(**vars(one), status="passed" if one.passed else "failed") for one in measured]


def _result(
    check: Check,
    spec: ModelSpec,
    device: torch.device,
    began: float,
    *,
    status: Literal["passed", "failed", "skipped"],
    detail: str,
    quantity: str = "",
    error: float | None = None,
    tolerance: float | None = None,
) -> Result:
    return Result(
        promise=check.promise,
        check=check.name,
        quantity=quantity,
        model=spec.name,
        device=device.type,
        dtype=training_dtype(device),
        error=error,
        tolerance=tolerance,
        status=status,
        seconds=round(time.perf_counter() - began, 3),
        detail=detail,
    )


# The table


def table_rows(results: Sequence[Result], *, each: bool) -> list[tuple[str, ...]]:
    """Rows of the table: per check, the model closest to its tolerance. With `each`, one row per model.

    Every failure gets its own row.
    """
    groups: dict[tuple[str, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.status == "skipped" and not each:
            continue
        is_single = each or result.status == "failed"
        groups[result.check, result.quantity, result.device, result.model if is_single else ""].append(result)
    rows = [_table_row(group) for group in groups.values()]
    return sorted(rows, key=lambda row: row[3])  # by device; the order of checks does not change


def reasons(results: Iterable[Result]) -> list[str]:
    """Reasons for failed and skipped checks, each once, with its checks and models."""
    models: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for result in results:
        if result.status != "passed" and result.detail:
            names = models[result.status, result.check, result.detail]
            if result.model not in names:
                names.append(result.model)
    grouped: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (status, check, detail), names in models.items():
        grouped[status, ", ".join(names), detail].append(check)
    return [
        f"{status}: {', '.join(checks)} on {names}: {detail}" for (status, names, detail), checks in grouped.items()
    ]


def summary_line(results: Sequence[Result]) -> str:
    counts = {status: sum(result.status == status for result in results) for status in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count) or "no checks ran"


def _table_row(group: Sequence[Result]) -> tuple[str, ...]:
    shown = max(group, key=_closeness)
    checks = {(result.model, result.check): result.seconds for result in group}
    return (
        str(shown.promise),
        f"{shown.check} {shown.quantity}".strip(),
        shown.model,
        f"{shown.device} {shown.dtype}",
        _format(shown.error),
        _format(shown.tolerance),
        shown.status,
        f"{sum(checks.values()):.1f}",
    )


def _closeness(result: Result) -> float:
    """Error divided by tolerance."""
    if result.error is None or result.tolerance is None or math.isnan(result.error):
        return math.inf
    if result.error == 0:
        return 0.0
    return result.error / result.tolerance if result.tolerance else math.inf


def _format(value: float | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value:.1e}"
