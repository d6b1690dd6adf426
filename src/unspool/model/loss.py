"""Head and cross-entropy in chunks, with the gradient computed in the same pass.

In: hidden states [T, D], the head's weight [V, D], labels [T] (already shifted, IGNORE where no loss).
Out: the loss summed over valid labels, in fp32.
Promise: no [T, V] tensor exists, only [chunk, V]; sums and the weight's gradient are kept in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
# Logits held at a time: 1 GiB in fp32, 2,048 tokens of a vocabulary of 128K. Larger chunks gain nothing on a GPU,
# smaller ones would leave it waiting for the next launch.
GPU_LOGITS = 1 << 28
# What stays in a CPU's cache is faster there.
CPU_CHUNK = 2048


def _chunk(hidden: Tensor, weight: Tensor) -> int:
    return max(1, GPU_LOGITS // len(weight)) if hidden.is_cuda else CPU_CHUNK


def summed_loss(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    """(differentiable sum of token losses, every token's loss without gradient); in the dtype of `hidden`."""
    total, losses = _ChunkedLoss.apply(hidden, weight, labels, chunk or _chunk(hidden, weight))  # type: ignore[no-untyped-call]
    return total, losses


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int | None = None) -> Tensor:
    """The loss of every token, 0 where ignored: for evaluation and per-source means."""
    chunk = chunk or _chunk(hidden, weight)
    pieces = [
        F.cross_entropy(_logits(part, weight), label, ignore_index=IGNORE, reduction="none")
        for part, label in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
    ]
    return torch.cat(pieces)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.to(hidden.dtype).t()).float()


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        losses = hidden.new_empty(len(labels), dtype=torch.float32)
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        head = weight.to(hidden.dtype)
        for start in range(0, len(labels), chunk):
            part, label = hidden[start : start + chunk], labels[start : start + chunk]
            logits = (part @ head.t()).float()
            valid = label != IGNORE
            target = label.masked_fill(~valid, 0)[:, None]
            log_norm = logits.logsumexp(dim=1)
            picked = logits.gather(1, target)[:, 0]
            losses[start : start + chunk] = (log_norm - picked) * valid
            # d loss / d logits = softmax − one-hot, in place of the logits.
            grad = logits.sub_(log_norm[:, None]).exp_()
            grad.scatter_add_(1, target, grad.new_full((), -1.0).expand_as(target))
            grad *= valid[:, None]
            grad = grad.to(hidden.dtype)
            hidden_grad[start : start + chunk] = grad @ head
            weight_grad += (grad.t() @ part).float()
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        scale = grad_outputs[0]
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * scale.to(hidden_grad.dtype), weight_grad * scale.to(weight_grad.dtype), None, None
