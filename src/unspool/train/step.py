"""One optimizer step: the loss is a sum over valid tokens divided by the step's count of them.

So the split into micro-batches changes neither loss nor gradient. Weights and moments are fp32;
on CUDA the forward pass runs in bf16 under autocast.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.model.head import read_head
from unspool.model.loss import summed_loss
from unspool.train.batch import Batch, row_sums
from unspool.train.loader import StepBatches
from unspool.train.optimizer import Updater


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float  # mean over the step's valid tokens
    losses: dict[str, float]  # the same by rows set
    grad_norm: float  # before clipping

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(model: Any, updater: Updater, work: StepBatches, *, lr: float) -> StepResult:
    """Forward and backward over the step's micro-batches, then one update, unless it is not finite."""
    device = next(model.parameters()).device
    num_valid = max(1, work.num_valid)
    updater.begin(lr)
    sums = [row_sums(_backward(model, batch.to(device), num_valid), batch.row_lens) for batch in work.batches]
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    valid = [count for batch in work.batches for count in batch.num_valid]
    for name, total, count in zip(work.names, torch.cat(sums).tolist(), valid, strict=True):
        totals[name] += total
        counts[name] += count
    loss = sum(totals.values()) / num_valid
    return StepResult(
        loss=loss,
        losses={name: total / max(1, counts[name]) for name, total in sorted(totals.items())},
        grad_norm=updater.finish(is_good=math.isfinite(loss)),
    )


def _backward(model: Any, batch: Batch, num_valid: int) -> Tensor:
    """Add this micro-batch's share of the step's gradient; returns every token's loss."""
    device = batch.tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state[0]
        if device.type == "cuda":
            hidden = hidden.to(torch.bfloat16)
        total, losses = summed_loss(hidden, read_head(model), batch.labels, num_valid=sum(batch.num_valid))
    (total / num_valid).backward()  # type: ignore[no-untyped-call]
    return losses
