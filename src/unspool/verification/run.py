"""Running the checks: every one on every model and device, results as they come.

In: subjects, checks, devices. Out: an iterator of `Result`s.
Promise: one model's failure does not keep the others from being checked; what could not be checked says why.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from unspool.core.errors import ConfigError
from unspool.models.export import PlainProcess
from unspool.models.tokenizer import first_line
from unspool.verification import exported, interruptions, isolation, memory_settings, splits
from unspool.verification.case import Case, build_case, training_dtype
from unspool.verification.families import Subject
from unspool.verification.results import Check, Measured, Result, SkippedError, Status
from unspool.verification.splits import Answers, rank_check


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


# The list of checks, by promise. A new one is a function of a `Case` and a line here.


PROMISES = {
    1: "Packing changes neither a document's loss nor its gradient; perturbing one document changes no other.",
    2: "Loss and gradient of a step do not depend on its split into micro-batches, the order of its rows or ranks.",
    3: "A run killed at any moment and resumed gives the same weights as one never killed.",
    4: "Exported checkpoints give the same logits in plain transformers.",
    5: "Chunked loss, recompute, offload and tiling change memory, not results.",
}


def build_checks(
    plain: PlainProcess, *, kills: int = interruptions.KILLS, ranks: Answers | None = None
) -> dict[str, Check]:
    """All checks by name; exports are loaded by `plain`, a run is killed so many times, `ranks` share a step."""
    return {
        check.name: check
        for check in (
            Check(
                name="packed",
                promise=1,
                what="each document's loss and gradient in a packed row, against the document alone",
                measure=isolation.packed,
            ),
            Check(
                name="alone",
                promise=1,
                what="another text in one document leaves all others the same to the last bit",
                measure=isolation.alone,
            ),
            Check(
                name="moved",
                promise=1,
                what="a document further down in the row says the same, so queries and keys turn alike",
                measure=isolation.moved,
            ),
            Check(
                name="split",
                promise=2,
                what="one step of eight rows in micro-batches of one, four and eight",
                measure=splits.split,
            ),
            Check(
                name="order",
                promise=2,
                what="one step with its rows in other orders",
                measure=splits.shuffled,
            ),
            *([rank_check(ranks)] if ranks else []),
            Check(
                name="resumed",
                promise=3,
                what="a stage cut off after several of its steps, against one that never was: bits and ledger",
                measure=interruptions.resumed,
            ),
            Check(
                name="killed",
                promise=3,
                what="a process killed at random moments (--kills) and begun again, against one that never was",
                measure=partial(interruptions.killed, kills=kills),
                once=True,
            ),
            Check(
                name="export",
                promise=4,
                what="logits of the exported folder in a fresh process without Unspool",
                measure=partial(exported.exported, plain=plain),
            ),
            Check(
                name="tables",
                promise=4,
                what="cosines and sines up to the last position, against float64",
                measure=exported.tables,
            ),
            Check(
                name="chunked-loss",
                promise=5,
                what="loss and gradients in chunks, against all logits at once",
                measure=memory_settings.chunked_loss,
            ),
            *memory_settings.policy_checks(),
        )
    }
