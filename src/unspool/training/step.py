"""One optimizer step: the loss is a sum over valid tokens divided by the step's count of them.

So neither loss nor gradient depends on micro-batches or ranks: every rank divides its part of the sum by the count of
all ranks. If labels have weights (training/losses), it is the sum of weight · loss by the step's sum of weights.

A CPU computes in the model's own precision, which is fp32 unless configured otherwise. A GPU computes in bf16, to which
`build_updater` converts the weights; an fp32 model runs under autocast.
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
from unspool.training.optim.updater import Updater
from unspool.training.parallel.dtensor import compute_device
from unspool.training.parallel.mesh import sum_over_ranks

METHOD = "loss_pass"


def batch_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Call `loss_pass` on a plain model, or as a method of an FSDP model, whose hooks need a method call."""
    method = getattr(model, METHOD, None)
    found: tuple[Tensor, Tensor] = loss_pass(model, batch) if method is None else method(batch)
    return found


def loss_pass(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed loss with its autograd graph, and the loss of every token."""
    device, head = batch.tokens.device, read_head(model)
    # Only for fp32 weights: autocast would compute norms in fp32 even if all weights are bf16.
    by_autocast = device.type == "cuda" and head.weight.dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16, enabled=by_autocast):
        hidden = model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state[0]
        if device.type == "cuda":
            hidden = hidden.to(torch.bfloat16)
        return summed_loss(hidden, head, batch.shift_labels, num_valid=sum(batch.num_valid), weights=batch.weights)


class StepUpdater(Protocol):
    """The part of `Updater` that a step needs."""

    def begin(self, lr: float) -> None: ...

    def finish(self, *, is_good: bool, max_norm: float) -> float: ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float  # mean over the step's valid tokens, weighted if they have weights
    losses: dict[str, float]  # the same by dataset
    grad_norm: float  # before clipping
    distance: float | None = None  # what `aux_loss` returned
    seconds: float | None = None  # on the device's clock, if the host does not wait for the step

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(
    model: Any,
    updater: StepUpdater,
    batches: StepBatches,
    *,
    lr: float,
    is_good: Callable[[float], bool] | None = None,
    max_norm: float = math.inf,
    mesh: DeviceMesh | None = None,
    aux_loss: Callable[[], float] | None = None,
) -> StepResult:
    """Forward and backward over the step's micro-batches, then one update. `aux_loss` adds to the gradient before it.

    Weights stay unchanged if loss or gradient is not finite, if `is_good` rejects the loss, or if the norm is above
    `max_norm`.
    """
    batches = batches.weighed(model, mesh)
    row_weights = _row_weights(batches)
    total_weight = _sum_over_ranks([sum(row_weights)], mesh)[0] or 1.0
    updater.begin(lr)
    sums = _backward_all(model, batches, total_weight).tolist()
    loss, losses = _mean_losses(batches, sums, row_weights, total_weight, mesh)
    distance = aux_loss() if aux_loss is not None else None
    grad_norm = updater.finish(is_good=math.isfinite(loss) and (is_good is None or is_good(loss)), max_norm=max_norm)
    return StepResult(loss=loss, losses=losses, grad_norm=grad_norm, distance=distance)


def start_step(
    model: Any, updater: Updater, batches: StepBatches, *, lr: float, before_update: Callable[[], None]
) -> Callable[[], StepResult]:
    """Start `train_step` on one rank without waiting for a GPU; return a function that waits for the result.

    `before_update` runs when the backward passes are queued, and must wait for the previous step. Weights stay
    unchanged if loss or gradient is not finite.
    """
    started = _mark() if compute_device(model).type == "cuda" else None
    batches = batches.weighed(model, None)
    row_weights = _row_weights(batches)
    total_weight = sum(row_weights) or 1.0
    updater.begin(lr)
    sums = _backward_all(model, batches, total_weight)
    before_update()
    norm = updater.finish_on_device(sums.sum())
    found, event = torch.cat([sums, norm.double()[None]]), None
    if found.is_cuda:
        found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        event = _mark()

    def result() -> StepResult:
        seconds = None
        if event is not None:
            event.synchronize()
            seconds = started.elapsed_time(event) / 1e3 if started is not None else None
        *row_sums, grad_norm = found.tolist()
        loss, losses = _mean_losses(batches, row_sums, row_weights, total_weight, None)
        updater.settle(loss, grad_norm)
        return StepResult(loss=loss, losses=losses, grad_norm=grad_norm, seconds=seconds)

    return result


def _mark() -> torch.cuda.Event:
    """Record an event on the GPU's clock, after the work queued so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _row_weights(batches: StepBatches) -> list[float]:
    """Sums of the weights of every row's labels; without weights, their numbers."""
    return [weight for batch in batches.batches for weight in batch.row_weights]


def _backward_all(model: Any, batches: StepBatches, total_weight: float) -> Tensor:
    """Forward and backward over all micro-batches. Returns the summed loss of every row, in float64."""
    device = compute_device(model)
    return torch.cat([_backward(model, batch.to(device), total_weight) for batch in batches.batches])


def _mean_losses(
    batches: StepBatches, sums: list[float], row_weights: list[float], total_weight: float, mesh: DeviceMesh | None
) -> tuple[float, dict[str, float]]:
    """The mean loss of a step over all ranks, and by dataset."""
    # Names from the picks, which all ranks share: a rank may have no row of some dataset.
    totals: dict[str, float] = {name: 0.0 for slot in batches.picks for name, _ in slot}
    weights = dict.fromkeys(totals, 0.0)
    for name, total, weight in zip(batches.names, sums, row_weights, strict=True):
        totals[name] += total
        weights[name] += weight
    found = _sum_over_ranks([*totals.values(), *weights.values()], mesh)
    totals = dict(zip(totals, found, strict=False))
    weights = dict(zip(weights, found[len(totals) :], strict=True))
    losses = {name: total / (weights[name] or 1.0) for name, total in sorted(totals.items())}
    return sum(totals.values()) / total_weight, losses


def _sum_over_ranks(values: list[float], mesh: DeviceMesh | None) -> list[float]:
    return values if mesh is None else sum_over_ranks(values, mesh)


def _backward(model: Any, batch: Batch, total_weight: float) -> Tensor:
    """Add this micro-batch's part of the step's gradient. Returns the summed loss of every row, in float64."""
    total, losses = batch_loss(model, batch)
    (total / total_weight).backward()  # type: ignore[no-untyped-call]
    return row_sums(losses if batch.weights is None else losses * batch.weights, batch.row_lens)
