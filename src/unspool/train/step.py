"""One optimizer step: the loss is a sum over valid tokens divided by the step's count of them.

So the split into micro-batches changes neither loss nor gradient. Weights and moments are fp32;
on CUDA the forward pass runs in bf16 under autocast.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from unspool.base.errors import ConfigError
from unspool.data.store import RowSet
from unspool.model.head import read_head
from unspool.model.loss import summed_loss
from unspool.train.batch import Batch, build_batch, row_sums
from unspool.train.config import StageConfig


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float  # mean over the step's valid tokens
    losses: dict[str, float]  # the same by rows set
    grad_norm: float  # before clipping

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def build_optimizer(stage: StageConfig, model: Any) -> Optimizer:
    """AdamW; norms and biases are not decayed, and what `lr_for` sets to 0 is not trained at all.

    A group's `share` is of the stage's learning rate, so that one schedule serves all.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in stage.lr_for:
        if not any(part in name for name in names):
            raise ConfigError(
                f"stage {stage.name}: lr_for has {part!r}, which is in no parameter's name; they read {names[1]} …"
            )
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        lr = next((lr for part, lr in stage.lr_for.items() if part in name), stage.lr)
        parameter.requires_grad_(lr > 0)
        if lr > 0:
            groups[lr / stage.lr, stage.weight_decay if parameter.dim() > 1 else 0.0].append(parameter)
    if not groups:
        raise ConfigError(f"stage {stage.name}: lr_for sets every parameter to 0, so nothing is trained.")
    settings = [{"params": params, "weight_decay": decay, "share": share} for (share, decay), params in groups.items()]
    return AdamW(settings, lr=stage.lr, betas=stage.betas, fused=next(model.parameters()).is_cuda)


def train_step(
    stage: StageConfig,
    model: Any,
    optimizer: Optimizer,
    rows: dict[str, RowSet],
    picks: Sequence[Sequence[tuple[str, int]]],
) -> StepResult:
    """Forward and backward over the picked rows in micro-batches, then one update, unless it is not finite."""
    device = next(model.parameters()).device
    slots_per_micro = (stage.micro_batch or stage.context) // stage.context
    micro_picks = [
        [pick for slot in picks[start : start + slots_per_micro] for pick in slot]
        for start in range(0, len(picks), slots_per_micro)
    ]
    batches = [
        build_batch([rows[name][index] for name, index in micro], attention=stage.attention) for micro in micro_picks
    ]
    num_valid = max(1, sum(sum(batch.num_valid) for batch in batches))
    sums = [row_sums(_backward(model, batch.to(device), num_valid), batch.row_lens) for batch in batches]
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), stage.clip)
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    names = [name for micro in micro_picks for name, _ in micro]
    valid = [count for batch in batches for count in batch.num_valid]
    for name, total, count in zip(names, torch.cat(sums).tolist(), valid, strict=True):
        totals[name] += total
        counts[name] += count
    result = StepResult(
        loss=sum(totals.values()) / num_valid,
        losses={name: total / max(1, counts[name]) for name, total in sorted(totals.items())},
        grad_norm=float(grad_norm),
    )
    if result.finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result


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
