"""Determine from gradients alone which token each position predicts, and with what weight.

At a hidden state, the gradient of a weighted cross-entropy is the weight times a direction that depends on the target.
Comparing the gradient with the directions of the next token, the token after it and the token itself gives target and
weight. This works for any loss code.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.data.packing.row import IGNORE
from unspool.models.loss import Head, read_head, summed_loss
from unspool.verification.audits.captures import Pass

# Candidate offsets of the predicted token: labels shifted once, twice, not at all, three times.
SHIFTS = (1, 2, 0, 3)
UNKNOWN = -1
# Positions without loss have no gradient at all.
ACTIVE = 1e-12
# Tokens that the model is certain of have tiny gradients. Below this fraction of the largest, they are rounding noise.
CLEAR = 1e-2
# Largest residual of a fitted gradient. Label smoothing and bf16 leave about 10%, wrong targets most of it.
RESIDUAL = 0.5


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Targets of one forward pass, [B, T]."""

    active: Tensor  # bool: contributes to the loss
    shift: Tensor  # int64: offset of the predicted token, or UNKNOWN
    clear: Tensor  # bool: active, with a gradient large enough to be read exactly
    weight: Tensor  # float64: weight of the position in the step's loss; NaN where not clear
    mean_weight: float  # over all active positions, by least squares
    loss: Tensor  # fp32: cross-entropy of the next token
    residual: float  # fraction of the gradients that no weighted cross-entropy explains


def read_targets(model: Any, one: Pass, wanted: Tensor | None) -> Targets:
    """Read targets. `wanted` [B, T] marks positions with a label; it decides where gradients are too small."""
    plain = read_head(model)
    bias = None if plain.bias is None else plain.bias.detach()
    head = Head(weight=plain.weight.detach(), bias=bias, scale=plain.scale, softcap=plain.softcap)
    shape = one.hidden.shape[:2]
    hidden = one.hidden.flatten(0, 1)
    grad = torch.zeros_like(hidden) if one.hidden_grad is None else one.hidden_grad.flatten(0, 1)
    grad = grad.double()
    size = grad.norm(dim=1)
    active = size > ACTIVE * float(size.max().clamp(min=1e-30))
    clear = active & (size > CLEAR * size.max())
    shift = torch.full_like(active, UNKNOWN, dtype=torch.int64)
    weight, best = torch.full_like(size, torch.nan), torch.full_like(size, RESIDUAL)
    projection, squares = torch.zeros_like(size), torch.zeros_like(size)
    next_loss = next_size = None
    for ahead in SHIFTS:
        losses, direction = _directions(hidden, head, _ahead(one.tokens, ahead))
        if next_loss is None or next_size is None:
            next_loss, next_size = losses, direction.norm(dim=1)
        along, square = (grad * direction).sum(dim=1), direction.square().sum(dim=1)
        found = along / square.clamp(min=1e-30)
        residual = (grad - found[:, None] * direction).norm(dim=1) / size.clamp(min=1e-30)
        # Where tokens repeat, two directions are equal. The next token wins.
        better = active & (found > 0) & (residual < best - 1e-3)
        shift[better], best[better], projection[better], squares[better] = (
            ahead,
            residual[better],
            along[better],
            square[better],
        )
        weight[better & clear] = found[better & clear]
    assert next_loss is not None and next_size is not None
    known = active & (shift != UNKNOWN)
    shift[active & ~clear & ~known] = 1
    if wanted is not None and bool(active.any()):
        certain = ~active & (next_size < CLEAR * next_size.max()) & wanted.to(active.device).flatten()
        active, shift[certain] = active | certain, 1
    return Targets(
        active=active.view(shape),
        shift=shift.view(shape),
        clear=clear.view(shape),
        weight=weight.view(shape),
        mean_weight=float(projection.sum() / squares.sum().clamp(min=1e-30)),
        loss=next_loss.view(shape),
        residual=float(best[known & clear].median()) if bool((known & clear).any()) else 0.0,
    )


def _ahead(tokens: Tensor, ahead: int) -> Tensor:
    labels = torch.full_like(tokens, IGNORE)
    labels[:, : tokens.shape[1] - ahead] = tokens[:, ahead:]
    return labels.flatten()


def _directions(hidden: Tensor, head: Head, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of every token, and its gradient at the hidden state, in float64."""
    with torch.enable_grad():
        states = hidden.detach().clone().requires_grad_()
        total, losses = summed_loss(states, head, labels)
        (grad,) = torch.autograd.grad(total, states)
    return losses, grad.double()
