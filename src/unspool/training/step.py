"""One optimizer step: the loss is a sum over valid tokens divided by the step's count of them.

So the split into micro-batches, and of these among ranks, changes neither loss nor gradient: every rank has its part of
the sum, and divides by the count of all. A CPU computes in the model's own precision, fp32
unless asked otherwise. A GPU computes in bf16, and so are the model's weights then, as `build_updater` leaves them; a
model that is still fp32 there is computed under autocast.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from unspool.models.loss import read_head, summed_loss
from unspool.training.batch import Batch, row_sums
from unspool.training.loader import StepBatches
from unspool.training.parallel.dtensor import computing_device
from unspool.training.parallel.mesh import sum_over_ranks

# The loss of one batch: the pass that a step differentiates.


METHOD = "loss_pass"


def batch_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """As `loss_pass`, by whatever way this model wants to be called."""
    method = getattr(model, METHOD, None)
    found: tuple[Tensor, Tensor] = loss_pass(model, batch) if method is None else method(batch)
    return found


def loss_pass(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    device, head = batch.tokens.device, read_head(model)
    # Only for weights in fp32: autocast computes norms and the like in fp32, also where all is bf16 already.
    by_autocast = device.type == "cuda" and head.weight.dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16, enabled=by_autocast):
        hidden = model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state[0]
        if device.type == "cuda":
            hidden = hidden.to(torch.bfloat16)
        return summed_loss(hidden, head, batch.labels, num_valid=sum(batch.num_valid))


class Updates(Protocol):
    """What a step needs of an updater."""

    def begin(self, lr: float) -> None: ...

    def finish(self, *, is_good: bool, max_norm: float) -> float: ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float  # mean over the step's valid tokens
    losses: dict[str, float]  # the same by rows set
    grad_norm: float  # before clipping
    distance: float | None = None  # what `aux_loss` returned

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(
    model: Any,
    updater: Updates,
    work: StepBatches,
    *,
    lr: float,
    is_good: Callable[[float], bool] | None = None,
    max_norm: float = math.inf,
    mesh: DeviceMesh | None = None,
    aux_loss: Callable[[], float] | None = None,
) -> StepResult:
    """Forward and backward over the step's micro-batches, then one update; `aux_loss` adds to the gradient before that.

    None where loss or gradient is not finite, where `is_good` refuses the loss or the gradient is above `max_norm`.
    """
    device = computing_device(model)
    num_valid = max(1, round(_total([work.num_valid], mesh)[0]))
    updater.begin(lr)
    sums = [row_sums(_backward(model, batch.to(device), num_valid), batch.row_lens) for batch in work.batches]
    # By the picks, which are the same on all ranks: a rank may have no row of some set.
    totals: dict[str, float] = {name: 0.0 for slot in work.picks for name, _ in slot}
    counts = dict.fromkeys(totals, 0)
    valid = [count for batch in work.batches for count in batch.num_valid]
    for name, total, count in zip(work.names, torch.cat(sums).tolist(), valid, strict=True):
        totals[name] += total
        counts[name] += count
    found = _total([*totals.values(), *counts.values()], mesh)
    totals = dict(zip(totals, found, strict=False))
    counts = dict(zip(counts, map(round, found[len(totals) :]), strict=True))
    loss = sum(totals.values()) / num_valid
    distance = aux_loss() if aux_loss is not None else None
    return StepResult(
        loss=loss,
        distance=distance,
        losses={name: total / max(1, counts[name]) for name, total in sorted(totals.items())},
        grad_norm=updater.finish(is_good=math.isfinite(loss) and (is_good is None or is_good(loss)), max_norm=max_norm),
    )


def _total(values: list[float], mesh: DeviceMesh | None) -> list[float]:
    return values if mesh is None else sum_over_ranks(values, mesh)


def _backward(model: Any, batch: Batch, num_valid: int) -> Tensor:
    """Add this micro-batch's share of the step's gradient; returns every token's loss."""
    total, losses = batch_loss(model, batch)
    (total / num_valid).backward()  # type: ignore[no-untyped-call]
    return losses
