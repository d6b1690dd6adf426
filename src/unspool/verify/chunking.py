"""Promise 5, the loss: head and cross-entropy in chunks against all logits at once."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.model.head import read_head
from unspool.model.loss import IGNORE, Head, summed_loss
from unspool.verify.case import Case
from unspool.verify.result import Measured
from unspool.verify.tolerance import FP32

TOKENS = 33
CHUNK = 7  # the last chunk is a part of one


def chunked_loss(case: Case) -> list[Measured]:
    """Loss and both gradients, in fp32 on every device, through the model's own head."""
    head = read_head(case.model)
    head = replace(head, weight=head.weight.float(), bias=None if head.bias is None else head.bias.float())
    generator = torch.Generator().manual_seed(case.seed)
    hidden = torch.randn(TOKENS, head.weight.shape[1], generator=generator).to(case.device)
    labels = torch.randint(len(head.weight), (TOKENS,), generator=generator).to(case.device)
    labels[::5] = IGNORE
    wanted = _results(hidden, head, labels, chunk=None)
    found = _results(hidden, head, labels, chunk=CHUNK)
    names = ("loss", "gradient", "head")  # of the states, of the head's weight
    return [
        Measured(quantity=name, error=float((mine - full).norm() / full.norm()), tolerance=FP32)
        for name, mine, full in zip(names, found, wanted, strict=True)
    ]


def _results(hidden: Tensor, head: Head, labels: Tensor, *, chunk: int | None) -> list[Tensor]:
    states, weight = hidden.clone().requires_grad_(), head.weight.detach().clone().requires_grad_()
    head = replace(head, weight=weight)
    if chunk is None:
        total = F.cross_entropy(head.logits(states), labels, ignore_index=IGNORE, reduction="sum")
    else:
        total, _ = summed_loss(states, head, labels, chunk=chunk)
    # A factor, as the step's count of tokens is one.
    (total / 3).backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None and weight.grad is not None
    return [total.detach(), states.grad, weight.grad]
