"""One model on one device with all that checks need: rows, the truth about them, and the model as we load it.

In: a `Subject`, a device, a seed. Out: `Case`.
Price: the plain model and ours are never in memory together; truths wait on the CPU.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.data.packing.store import Row
from unspool.models.fuse import cast_parameters
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.step import train_step
from unspool.verification.families import Subject
from unspool.verification.ground_truth import (
    ROW,
    Apart,
    Outcome,
    exact_outcome,
    fp32_error,
    gradients,
    place_positions,
    plain_outcome,
    summed_gradients,
    usual_error,
)
from unspool.verification.tolerance import FP32_WORST_WEIGHT, allowed
from unspool.verification.training_rows import Step, build_steps, only_document, row_len

# Parameters from which on a CPU needs minutes; equal documents are a case of their own for a GPU's kernels only.
LARGE = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Tolerances:
    """Of an `Apart`."""

    loss: float
    gradient: float
    middle: float


@dataclass(frozen=True, kw_only=True)
class Case:
    subject: Subject
    device: torch.device
    seed: int
    model: Any  # as training has it
    steps: dict[str, Step]
    truths: dict[str, Outcome]  # of each step, in a higher precision than training's
    plain: dict[str, Apart]  # how far plain `transformers` is from it in the precision of training

    @property
    def dtype(self) -> str:
        """What training computes in here."""
        return training_dtype(self.device)

    def model_in_fp32(self) -> Any:
        """For what is to be exact, whatever training computes in."""
        return self.model if self.dtype == "fp32" else copy.deepcopy(self.model).float()

    def tolerances(self, step: str) -> Tolerances:
        measured = self.plain[step]
        # In bf16 a mean's error is large or small by chance; the largest of those of all documents is not.
        loss = measured.loss if self.dtype == "fp32" else max(each.loss for each in self.plain.values())
        return Tolerances(
            loss=allowed(loss, self.dtype),
            gradient=allowed(measured.gradient, self.dtype, most=FP32_WORST_WEIGHT),
            middle=allowed(measured.middle, self.dtype) if self.dtype == "fp32" else math.inf,
        )


def training_dtype(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def build_case(subject: Subject, *, device: torch.device, seed: int) -> Case:
    plain = subject.plain(device)
    if subject.placed is not None:
        place_positions(plain, subject.placed)
    length = row_len(plain.num_parameters(), device)
    steps = build_steps(length, vocabulary=plain.config.vocab_size, seed=seed)
    if device.type == "cpu" and plain.num_parameters() > LARGE:
        del steps["equal"]
    half = training_dtype(device) == "bf16"
    if half:
        # fp32 is exact enough to measure bf16 by, and float64 would take memory that a GPU may not have.
        # Both sides start from weights that bf16 can hold: what is measured is how they compute.
        cast_parameters(plain, torch.bfloat16)
        cast_parameters(plain, torch.float32)
        truths = {name: plain_outcome(plain, step) for name, step in steps.items()}
        cast_parameters(plain, torch.bfloat16)
        errors = {name: usual_error(plain, step, truths[name], asked_only=False) for name, step in steps.items()}
    else:
        truths = {name: exact_outcome(plain, step) for name, step in steps.items()}
        plain.to(torch.float32)  # the very weights it was loaded with; of a GGUF file, `.float()` is refused
        errors = {name: fp32_error(plain, step, truths[name], seed=seed) for name, step in steps.items()}
    del plain
    return Case(
        subject=subject,
        device=device,
        seed=seed,
        model=subject.ours(device, bf16=half),
        steps=steps,
        truths=truths,
        plain=errors,
    )


# What training makes of a step: the same code as a stage runs, with the gradient caught instead of applied.


class _Catch:
    """Stands where the updater stands, and adds up the gradient as that does."""

    def __init__(self, model: Any, sums: dict[str, Tensor]) -> None:
        self._model, self._sums = model, sums
        self.grads: dict[str, Tensor] = {}

    def begin(self, lr: float) -> None:
        self._sums.clear()

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        if is_good:
            self.grads = gradients(self._model, self._sums)
        return 0.0


def trained(model: Any, step: Step, *, rows_at_once: int = 1, order: Sequence[int] | None = None) -> Outcome:
    """Loss and gradient of the whole step, `rows_at_once` in each micro-batch."""
    loss, grads = _train(model, step.rows, rows_at_once=rows_at_once, order=order)
    return Outcome({ROW: loss}, {ROW: grads})


def trained_document(model: Any, step: Step, number: int, *, gradient: bool) -> Outcome:
    """Loss and, if asked for, gradient of one document, packed with the others."""
    (row,) = step.rows
    loss, grads = _train(model, (only_document(row, number),))
    name = f"document {number}"
    return Outcome({name: loss}, {name: grads} if gradient else {})


def _train(
    model: Any, rows: Sequence[Row], *, rows_at_once: int = 1, order: Sequence[int] | None = None
) -> tuple[float, dict[str, Tensor]]:
    context = len(rows[0].tokens)
    stage = StageConfig(
        name="verify",
        context_length=context,
        mix={"rows": 1.0},
        tokens=context * len(rows),
        batch_tokens=context * len(rows),
        micro_batch_tokens=context * rows_at_once,
        lr=1.0,
    )
    row_sets: Any = {"rows": rows}
    picks = [[("rows", index)] for index in order or range(len(rows))]
    with summed_gradients(model) as sums:
        catch = _Catch(model, sums)
        result = train_step(model, catch, build_step(stage, row_sets, picks), lr=stage.lr)
    return result.loss, catch.grads
