"""Promise 5, the loss: head and cross-entropy in chunks against all logits at once.

Against float64, since chunks of a few tokens round otherwise than all at once (tolerance.py); how much is measured with
plain cross-entropy, at once and on as many tokens at a time.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.model.head import read_head
from unspool.model.loss import IGNORE, Head, summed_loss
from unspool.verify.case import Case
from unspool.verify.result import Measured
from unspool.verify.tolerance import allowed
from unspool.verify.truth import Doubled

TOKENS = 33
CHUNK = 7  # the last chunk is a part of one


def chunked_loss(case: Case) -> list[Measured]:
    """Loss and both gradients, in fp32 on every device, through the model's own head."""
    head = _in(read_head(case.model), torch.float32, case.device)
    generator = torch.Generator().manual_seed(case.seed)
    hidden = torch.randn(TOKENS, head.weight.shape[1], generator=generator).to(case.device)
    labels = torch.randint(len(head.weight), (TOKENS,), generator=generator).to(case.device)
    labels[::5] = IGNORE
    with Doubled():
        # On the CPU: a large head in float64 may not fit beside the model.
        wanted = _plain(hidden.cpu().double(), _in(head, torch.float64, "cpu"), labels.cpu(), at_once=TOKENS)
    usual = [_apart(_plain(hidden, head, labels, at_once=count), wanted) for count in (TOKENS, CHUNK)]
    found = _apart(_chunked(hidden, head, labels), wanted)
    names = ("loss", "gradient", "head")  # of the states, of the head's weight
    return [
        Measured(quantity=name, error=error, tolerance=allowed(max(plain), "fp32"))
        for name, error, *plain in zip(names, found, *usual, strict=True)
    ]


def _in(head: Head, dtype: torch.dtype, device: torch.device | str) -> Head:
    bias = None if head.bias is None else head.bias.to(device, dtype)
    return replace(head, weight=head.weight.to(device, dtype), bias=bias)


def _plain(hidden: Tensor, head: Head, labels: Tensor, *, at_once: int) -> list[Tensor]:
    """Plain cross-entropy, on all logits of so many tokens that are asked for."""
    states, head = _with_gradients(hidden, head)
    asked = (labels != IGNORE).nonzero()[:, 0]
    losses = [
        F.cross_entropy(head.logits(states[rows]), labels[rows], reduction="sum")
        for rows in torch.split(asked, at_once)
    ]
    return _results(torch.stack(losses).sum(), states, head)


def _chunked(hidden: Tensor, head: Head, labels: Tensor) -> list[Tensor]:
    states, head = _with_gradients(hidden, head)
    total, _ = summed_loss(states, head, labels, chunk=CHUNK)
    return _results(total, states, head)


def _with_gradients(hidden: Tensor, head: Head) -> tuple[Tensor, Head]:
    weight = head.weight.detach().clone().requires_grad_()
    return hidden.clone().requires_grad_(), replace(head, weight=weight)


def _results(total: Tensor, states: Tensor, head: Head) -> list[Tensor]:
    # A factor, as the step's count of tokens is one.
    (total / 3).backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None and head.weight.grad is not None
    return [total.detach(), states.grad, head.weight.grad]


def _apart(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((mine.cpu() - full).norm() / full.norm()) for mine, full in zip(found, wanted, strict=True)]
