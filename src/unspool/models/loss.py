"""Output head and cross-entropy in chunks, with the gradient computed in the forward pass.

No [T, V] tensor exists, only [chunk, V]. Sums and the weight's gradient are kept in fp32. Ignored tokens cost nothing
if the number of valid tokens is known. The forward pass computes the gradients, which can be used once.

For 64K tokens, hidden size 4,096, a vocabulary of 128,256 and bf16 the peak is 2.83 GiB. Of these, 1.96 are for the
weight's gradient in fp32, and 0.50 for the hidden states' gradient. A chunk's logits take 0.37 and become their own
gradient in place.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.data.packing.row import IGNORE

# Bytes of logits per chunk. Each chunk reads and writes the weight's gradient once, so smaller chunks cost time.
GPU_LOGITS = 384 << 20
# Tokens per chunk on a CPU: their logits fit into its cache.
CPU_CHUNK = 2048
# Rows to scale or round at a time, so that no second copy of the whole tensor exists.
ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class Head:
    """An output head: logits are softcap(scale · (weight · hidden + bias))."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # logit z becomes cap · tanh(z / cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, fp32[n, V], from a matrix product in the dtype of `hidden`."""
        bias = None if self.bias is None else self.bias.to(hidden.dtype)
        return _scale_and_cap(F.linear(hidden, self.weight.to(hidden.dtype), bias).float(), self.scale, self.softcap)


def summed_loss(
    hidden: Tensor,
    head: Head | Tensor,
    labels: Tensor,
    *,
    chunk: int | None = None,
    num_valid: int | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the differentiable sum of token losses in fp32, and every token's loss without gradient.

    `hidden` is [T, D]; `head` may be a plain weight [V, D]; `labels` [T] are already shifted, and IGNORE where a token
    carries no loss. `num_valid` counts the other labels; if it is given, the device is not synchronized. With
    `weights`, fp32[T], the sum is that of weight · loss; the token losses are not weighted.
    """
    head = head if isinstance(head, Head) else Head(weight=head)
    chunk = chunk or _chunk(hidden, head.weight)
    if num_valid is None and not hidden.is_cuda:
        num_valid = int((labels != IGNORE).sum())
    matrix, bias = head.weight, head.bias
    if not torch.is_grad_enabled():
        # Otherwise the forward pass would compute their gradients.
        matrix, bias = matrix.detach(), None if bias is None else bias.detach()
    args = (hidden, matrix, bias, labels, weights, head.scale, head.softcap, chunk, num_valid)
    # All tensors have the dtype of `hidden`; autocast would change it only in some products.
    with torch.autocast(hidden.device.type, enabled=False):
        total, losses = _ChunkedLoss.apply(*args)  # type: ignore[no-untyped-call]
    return total, losses


@torch.no_grad()
def token_losses(hidden: Tensor, head: Head | Tensor, labels: Tensor, *, chunk: int | None = None) -> Tensor:
    """Return the loss of every token without gradient, 0 where ignored."""
    head = head if isinstance(head, Head) else Head(weight=head)
    chunk = chunk or _chunk(hidden, head.weight)
    pieces = [
        F.cross_entropy(head.logits(part), label, ignore_index=IGNORE, reduction="none")
        for part, label in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True)
    ]
    return torch.cat(pieces)


def _chunk(hidden: Tensor, weight: Tensor) -> int:
    if not hidden.is_cuda:
        return CPU_CHUNK
    size = GPU_LOGITS // (len(weight) * hidden.element_size())
    # Kernels of matrix products work on tiles of 128.
    return max(1, size // 128 * 128 or size)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        scale: float,
        softcap: float | None,
        chunk: int,
        num_valid: int | None,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        losses = hidden.new_zeros(len(labels), dtype=torch.float32)
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        sums = _WeightGrad(weight) if needs_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        matrix = weight.to(hidden.dtype)
        shift = None if bias is None else bias.to(hidden.dtype)
        for rows in _valid_rows(labels, chunk, num_valid):
            part = hidden[rows]
            grad = F.linear(part, matrix, shift)
            own = None if weights is None else weights[rows]
            losses[rows], grad = _softmax_grad(grad, labels[rows], scale, softcap, own)
            if hidden_grad is not None:
                hidden_grad[rows] = grad @ matrix
            if sums is not None:
                sums.add(grad, part)
            if bias_grad is not None:
                bias_grad += grad.sum(dim=0, dtype=torch.float32)
            del grad  # free it before the next chunk's logits are computed
        weight_grad = None if sums is None else sums.rounded()
        ctx.grads = [hidden_grad, weight_grad, None if bias is None or bias_grad is None else bias_grad.to(bias.dtype)]
        ctx.mark_non_differentiable(losses)
        return (losses if weights is None else losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "This loss has been differentiated before; compute it again, because its gradients are used in place."
            )
        grads, ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                _scale(grad, grad_outputs[0])
        return (*grads, None, None, None, None, None, None)


def _valid_rows(labels: Tensor, chunk: int, num_valid: int | None) -> list[Any]:
    """Return chunks of rows with a loss: slices, or indices if so many rows are ignored that gathering pays."""
    if num_valid is None or num_valid > 0.95 * len(labels):
        return [slice(start, start + chunk) for start in range(0, len(labels), chunk)]
    # Sort instead of `nonzero`, which would synchronize with the device to get the count.
    order = torch.argsort((labels == IGNORE).to(torch.int8), stable=True)
    return list(torch.split(order[:num_valid], chunk)) if num_valid else []


def _softmax_grad(
    logits: Tensor, labels: Tensor, scale: float, softcap: float | None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return every row's loss in fp32, and weight · d loss / d logits, which replaces the logits on CUDA."""
    if logits.is_cuda:
        from unspool.models.loss_kernel import softmax_grad_

        return softmax_grad_(logits, labels, scale, softcap, weights), logits
    shaped = _scale_and_cap(logits.float(), scale, softcap)
    valid = labels != IGNORE
    target = labels.masked_fill(~valid, 0)[:, None]
    # Subtract the largest logit first: a log-sum in the thousands would lose digits of the differences.
    below = shaped - shaped.amax(dim=1, keepdim=True)
    at_target = below.gather(1, target)[:, 0]
    grad = below.exp_()
    total = grad.sum(dim=1, keepdim=True)
    losses = (total[:, 0].log() - at_target) * valid
    # softmax − one-hot, times the derivative of scale and cap.
    grad /= total
    grad.scatter_add_(1, target, grad.new_full((), -1.0).expand_as(target))
    grad *= valid[:, None] * scale
    if softcap is not None:
        grad *= 1 - (shaped / softcap).square()
    if weights is not None:
        grad *= weights[:, None]
    return losses, grad.to(logits.dtype)


def _scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _scale(grad: Tensor, factor: Tensor) -> None:
    """Scale in place by an fp32 factor: rounded to bf16, it would shift every gradient by up to 1 part in 500."""
    for rows in torch.split(grad, ROWS):
        rows.copy_(rows.float() * factor)


class _WeightGrad:
    """The weight's gradient, summed in fp32 and rounded at the end without a second tensor.

    The sum is stored in two halves. Rounded to 16 bits, both halves fit into the memory of the first.
    """

    def __init__(self, weight: Tensor) -> None:
        self._shape, self._dtype = weight.shape, weight.dtype
        half = -(-len(weight) // 2) if weight.element_size() == 2 else len(weight)
        sizes = [half, len(weight) - half] if half < len(weight) else [half]
        self._halves = [weight.new_zeros((size, weight.shape[1]), dtype=torch.float32) for size in sizes]

    def add(self, grad: Tensor, hidden: Tensor) -> None:
        """Add gradᵀ · hidden."""
        parts = torch.split(grad, [len(half) for half in self._halves], dim=1)
        for half, part in zip(self._halves, parts, strict=True):
            if grad.dtype == torch.float32:
                half.addmm_(part.t(), hidden)
            elif grad.is_cuda:
                # The matrix product adds to the fp32 sum in its epilogue, from 16-bit factors.
                torch.addmm(half, part.t(), hidden, out_dtype=torch.float32, out=half)
            else:
                half += (part.t() @ hidden).float()

    def rounded(self) -> Tensor:
        first, *second = self._halves
        if first.dtype == self._dtype:
            return first
        if first.element_size() != 2 * torch.empty((), dtype=self._dtype).element_size():
            return torch.cat(self._halves).to(self._dtype)
        out = first.view(-1).view(self._dtype).view(2 * len(first), -1)[: self._shape[0]]
        # Row r of the result overwrites row r/2 of the sum, which has been read already.
        for start in range(0, len(first), ROWS):
            out[start : min(start + ROWS, len(first))] = first[start : start + ROWS].to(self._dtype)
        for half in second:
            out[len(first) :] = half
        self._halves = []
        return out


# The head of a model


# Config fields that multiply (1: Cohere) or divide (−1: Granite) the logits.
_FACTORS = {"logit_scale": 1, "logits_scaling": -1}


def read_head(model: Any) -> Head:
    """Read a model's head: its weight and bias, and the scale and cap of the logits in its config."""
    layer = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = 1.0
    for name, power in _FACTORS.items():
        factor = getattr(config, name, None)
        if factor:
            scale *= float(factor) ** power
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(
        weight=layer.weight,
        bias=getattr(layer, "bias", None),
        scale=scale,
        softcap=float(cap) if cap else None,
    )


# Losses by position, as means over ranges of doubling length


def bucket_edges(length: int) -> list[int]:
    """Return 0, 64, 128, 256, …, length; for lengths above 4K the first edge after 0 is 128."""
    edges = [0, 64 if length <= 4096 else 128]
    while edges[-1] * 2 < length:
        edges.append(edges[-1] * 2)
    return [edge for edge in edges if edge < length] + [length]


def bucket_losses(losses: np.ndarray) -> list[dict[str, Any]]:
    """Return the mean loss of tokens at positions [from, to), given the loss at positions 1, 2, …"""
    # The first token is never a prediction target.
    return bucket_means(losses, np.arange(1, len(losses) + 1), length=len(losses) + 1)


def bucket_means(losses: np.ndarray, positions: np.ndarray, *, length: int) -> list[dict[str, Any]]:
    """Return the mean loss of tokens at positions [from, to) below `length`; None with n 0 if there are none."""
    order = np.argsort(positions, kind="stable")
    losses, positions = losses[order], positions[order]
    buckets = []
    for start, stop in pairwise(bucket_edges(length)):
        first, last = np.searchsorted(positions, (start, stop))
        part = losses[first:last]
        value = float(part.mean()) if len(part) else None
        buckets.append({"from": start, "to": stop, "value": value, "n": len(part)})
    return buckets
