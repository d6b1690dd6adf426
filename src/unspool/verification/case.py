"""Input and output of a check: a model with rows and reference results, and measured errors."""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.data.packing.row import Row
from unspool.models.fuse import cast_parameters
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.losses.base import LossWeights
from unspool.training.step import train_step
from unspool.verification.fixtures import ModelSpec, Step, build_steps, lower_original_len, only_document, row_len
from unspool.verification.ground_truth import (
    STEP,
    Difference,
    Outcome,
    apply_rope_by_hand,
    exact_outcome,
    fp32_rounding_error,
    gradients,
    plain_outcome,
    rounding_error,
    summed_gradients,
)
from unspool.verification.tolerance import FP32_WORST_WEIGHT, tolerance_for

# Larger models need minutes on a CPU. The step with documents of equal length tests only GPU kernels.
LARGE_MODEL = 50_000_000
# Format of an error line from Python, and from torch on a rank.
_ERROR = re.compile(r"(?:\[rank\d+\]: )?([\w.]+(?:Error|Exception|Exit|Interrupt): .*)")


class SkippedError(Exception):
    """A check does not apply to this model or machine. The message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    quantity: str  # loss | gradient | logits | …
    error: float
    tolerance: float
    detail: str = ""  # where the error is largest

    @property
    def passed(self) -> bool:
        # False if the error is NaN.
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one device, with the rows of each step and reference results.

    The plain model and our model are never in memory together. Reference results are on the CPU.
    """

    spec: ModelSpec
    device: torch.device
    seed: int
    model: Any  # set up as in training
    steps: dict[str, Step]
    truths: dict[str, Outcome]  # per step, in higher precision than training
    plain: dict[str, Difference]  # errors of plain `transformers` in the training precision

    @property
    def dtype(self) -> str:
        return training_dtype(self.device)

    def model_in_fp32(self) -> Any:
        return self.model if self.dtype == "fp32" else copy.deepcopy(self.model).float()

    def tolerances(self, step: str) -> tuple[float, float, float]:
        """Tolerances of a step: loss, gradient of one weight, and median gradient error over weights."""
        plain = self.plain[step]
        # In bf16, the error of one mean may be small by chance. So use the largest error of all documents.
        plain_loss = plain.loss if self.dtype == "fp32" else max(each.loss for each in self.plain.values())
        return (
            tolerance_for(plain_loss, self.dtype),
            tolerance_for(plain.gradient, self.dtype, max_tolerance=FP32_WORST_WEIGHT),
            tolerance_for(plain.median, self.dtype) if self.dtype == "fp32" else math.inf,
        )

    def measure(self, found: list[tuple[str, Difference]]) -> list[Measured]:
        """Pick the loss and the gradient closest to their tolerance over several steps."""
        losses, grads = [], []
        for step, far in found:
            loss, weight, median = self.tolerances(step)
            where = f"{step}: {far.gradient_where}"
            losses.append(Measured(quantity="loss", error=far.loss, tolerance=loss, detail=f"{step}: {far.loss_where}"))
            grads.append(Measured(quantity="gradient", error=far.gradient, tolerance=weight, detail=where))
            where = f"{step}: median over weights"
            grads.append(Measured(quantity="gradient", error=far.median, tolerance=median, detail=where))
        return [max(each, key=_closeness) for each in (losses, grads)]


def _closeness(measured: Measured) -> float:
    return math.inf if math.isnan(measured.error) else measured.error / measured.tolerance


@dataclass(frozen=True)
class Check:
    name: str
    promise: int
    what: str  # one line for --list
    measure: Callable[[Case], list[Measured]]
    once: bool = False  # independent of the model: run it for one model only


def training_dtype(device: torch.device) -> str:
    return "bf16" if device.type == "cuda" else "fp32"


def build_case(spec: ModelSpec, *, device: torch.device, seed: int) -> Case:
    plain = spec.load_plain(device)
    if spec.rope is not None:
        apply_rope_by_hand(plain, spec.rope)
    lower_original_len(plain, device)
    length = row_len(plain.num_parameters(), device)
    steps = build_steps(length, vocabulary=plain.config.vocab_size, seed=seed)
    if device.type == "cpu" and plain.num_parameters() > LARGE_MODEL:
        del steps["equal"]
    is_bf16 = training_dtype(device) == "bf16"
    if is_bf16:
        # fp32 is accurate enough as a reference for bf16; float64 may not fit on a GPU.
        # Both sides start from bf16-representable weights, so only the computation differs.
        cast_parameters(plain, torch.bfloat16)
        cast_parameters(plain, torch.float32)
        truths = {name: plain_outcome(plain, step) for name, step in steps.items()}
        cast_parameters(plain, torch.bfloat16)
        errors = {name: rounding_error(plain, step, truths[name], targets_only=False) for name, step in steps.items()}
    else:
        truths = {name: exact_outcome(plain, step) for name, step in steps.items()}
        plain.to(torch.float32)  # keeps the loaded weights exactly; transformers refuses `.float()` for a GGUF file
        errors = {name: fp32_rounding_error(plain, step, truths[name], seed=seed) for name, step in steps.items()}
    del plain
    return Case(
        spec=spec,
        device=device,
        seed=seed,
        model=spec.load_ours(device, bf16=is_bf16),
        steps=steps,
        truths=truths,
        plain=errors,
    )


# A training step: the code of a stage, with a gradient recorder instead of the optimizer


class _GradientRecorder:
    """Replaces the updater and sums gradients in the same way."""

    def __init__(self, model: Any, sums: dict[str, Tensor]) -> None:
        self._model, self._sums = model, sums
        self.grads: dict[str, Tensor] = {}

    def begin(self, lr: float) -> None:
        self._sums.clear()

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        if is_good:
            self.grads = gradients(self._model, self._sums)
        return 0.0


def train_outcome(
    model: Any,
    step: Step,
    *,
    rows_at_once: int = 1,
    order: Sequence[int] | None = None,
    loss_weights: LossWeights | None = None,
) -> Outcome:
    """Loss and gradient of the whole step, with `rows_at_once` rows per micro-batch."""
    loss, grads = _train(model, step.rows, rows_at_once=rows_at_once, order=order, loss_weights=loss_weights)
    return Outcome({STEP: loss}, {STEP: grads})


def train_document(model: Any, step: Step, number: int, *, gradient: bool) -> Outcome:
    """Loss (and optionally gradient) of one document, packed with the others."""
    (row,) = step.rows
    loss, grads = _train(model, (only_document(row, number),))
    name = f"document {number}"
    return Outcome({name: loss}, {name: grads} if gradient else {})


def _train(
    model: Any,
    rows: Sequence[Row],
    *,
    rows_at_once: int = 1,
    order: Sequence[int] | None = None,
    loss_weights: LossWeights | None = None,
) -> tuple[float, dict[str, Tensor]]:
    length = len(rows[0].tokens)
    stage = step_stage(length, len(rows), micro_batch_tokens=length * rows_at_once)
    row_sets: Any = {"rows": rows}
    picks = [[("rows", index)] for index in order or range(len(rows))]
    with summed_gradients(model) as sums:
        recorder = _GradientRecorder(model, sums)
        work = build_step(stage, row_sets, picks, loss_weights=loss_weights)
        result = train_step(model, recorder, work, lr=stage.lr)
    return result.loss, recorder.grads


def step_stage(length: int, num_rows: int, **settings: Any) -> StageConfig:
    """A stage of one step on rows of equal length."""
    tokens = length * num_rows
    return StageConfig(
        name="verify", context_length=length, mix={"rows": 1.0}, tokens=tokens, batch_tokens=tokens, lr=1.0, **settings
    )


def error_line(output: str) -> str:
    """Last line that names an error in the output of a failed process, else its last line.

    CUDA prints advice after an error, and libraries may print more lines.
    """
    lines = output.strip().splitlines()
    named = [found[1] for line in lines if (found := _ERROR.match(line))]
    return (named or lines or [""])[-1]
