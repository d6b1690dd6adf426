"""One model on one device with all that checks need: rows, the truth about them, and the model as we load it.

In: a `Subject`, a device, a seed. Out: `Case`.
Price: the plain model and ours are never in memory together; truths wait on the CPU.
"""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from unspool.verify.rows import Step, build_steps, row_len
from unspool.verify.subjects import Subject
from unspool.verify.tolerance import FP32_WORST_WEIGHT, allowed
from unspool.verify.truth import (
    Apart,
    Outcome,
    apart,
    batched_outcome,
    exact_outcome,
    larger,
    place_positions,
    plain_outcome,
)

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
        """What training computes in here; weights are fp32 everywhere."""
        return training_dtype(self.device)

    def tolerances(self, step: str) -> Tolerances:
        measured = self.plain[step]
        return Tolerances(
            loss=allowed(measured.loss, self.dtype),
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
    # In bf16, fp32 is exact enough to measure by, and float64 would take memory that a GPU may not have.
    half = training_dtype(device) == "bf16"
    again = {name: [plain_outcome(plain, step, autocast=half)] for name, step in steps.items()}
    again["several"].append(batched_outcome(plain, steps["several"], autocast=half))
    truths = {name: (plain_outcome if half else exact_outcome)(plain, step) for name, step in steps.items()}
    del plain
    return Case(
        subject=subject,
        device=device,
        seed=seed,
        model=subject.ours(device),
        steps=steps,
        truths=truths,
        plain={name: reduce(larger, (apart(one, truths[name]) for one in again[name])) for name in steps},
    )
