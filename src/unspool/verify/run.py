"""Running the checks: every one on every model and device, results as they come.

In: subjects, checks, devices. Out: an iterator of `Result`s.
Promise: one model's failure does not keep the others from being checked; what could not be checked says why.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from unspool.base.errors import ConfigError
from unspool.model.tokenizer import first_line
from unspool.verify.case import Case, build_case, training_dtype
from unspool.verify.result import Check, Measured, Result, SkippedError, Status
from unspool.verify.subjects import Subject


def run_checks(
    subjects: Sequence[Subject], checks: Sequence[Check], *, device: torch.device, seed: int
) -> Iterator[list[Result]]:
    """The results of one check on one model at a time."""
    for subject in subjects:
        began = time.perf_counter()
        try:
            case = build_case(subject, device=device, seed=seed)
        except ConfigError as error:
            for check in checks:
                yield [_without(check, subject, device, "skipped", str(error), began)]
            continue
        for check in checks:
            yield run_check(check, case)


def run_check(check: Check, case: Case) -> list[Result]:
    began = time.perf_counter()
    try:
        measured = check.measure(case)
    except (SkippedError, ConfigError) as error:
        return [_without(check, case.subject, case.device, "skipped", str(error), began)]
    except RuntimeError as error:  # torch's: out of memory, a kernel that refuses
        return [_without(check, case.subject, case.device, "failed", first_line(error), began)]
    seconds = time.perf_counter() - began
    return [_result(check, case, one, seconds) for one in measured]


def _result(check: Check, case: Case, measured: Measured, seconds: float) -> Result:
    return Result(
        promise=check.promise,
        check=check.name,
        quantity=measured.quantity,
        model=case.subject.name,
        device=case.device.type,
        dtype=case.dtype,
        error=measured.error,
        tolerance=measured.tolerance,
        status="passed" if measured.passed else "failed",
        seconds=round(seconds, 3),
        detail=measured.detail,
    )


def _without(check: Check, subject: Subject, device: torch.device, status: Status, reason: str, began: float) -> Result:
    return Result(
        promise=check.promise,
        check=check.name,
        quantity="",
        model=subject.name,
        device=device.type,
        dtype=training_dtype(device),
        error=None,
        tolerance=None,
        status=status,
        seconds=round(time.perf_counter() - began, 3),
        detail=reason,
    )
