"""Promise 5, memory settings: recompute, offload and tiling give the loss and gradient of plain `transformers`."""

import copy
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.data.packing.store import IGNORE
from unspool.models.loss import Head, read_head, summed_loss
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.verification.case import Case, trained
from unspool.verification.ground_truth import Doubled, apart
from unspool.verification.isolation import worst
from unspool.verification.results import Check, Measured
from unspool.verification.tolerance import allowed

# Tiles are to be cut: none of the rows is a multiple of this.
TILE = 37
POLICIES: dict[str, MemoryPolicy] = {
    "activation-checkpointing": MemoryPolicy(activation_checkpointing="full"),
    "keep-attention": MemoryPolicy(activation_checkpointing="keep-attention"),
    "keep-products": MemoryPolicy(activation_checkpointing="keep-attention", keep_products=2, keep_on_host=1),
    "layers-per-checkpoint": MemoryPolicy(activation_checkpointing="full", layers_per_checkpoint=2),
    "offload": MemoryPolicy(activation_checkpointing="full", offload=True),
    "mlp-tiles": MemoryPolicy(mlp_tiles=TILE),
    "heads-at-once": MemoryPolicy(attention_heads_at_once=1),
    "all-memory": MemoryPolicy(
        activation_checkpointing="keep-attention",
        layers_per_checkpoint=2,
        offload=True,
        mlp_tiles=TILE,
        attention_heads_at_once=1,
    ),
}
WHAT = {
    "activation-checkpointing": "every layer computed again in the backward pass",
    "keep-attention": "the same, but attention's results are kept",
    "keep-products": "matrix products of two layers are kept as well, one of them in host memory",
    "layers-per-checkpoint": "two layers share a checkpoint",
    "offload": "checkpoints wait in host memory",
    "mlp-tiles": f"norms and MLPs over {TILE} tokens at a time",
    "heads-at-once": "attention for one KV head at a time",
    "all-memory": "all of these together",
}


def policy_checks() -> list[Check]:
    return [
        Check(name=name, promise=5, what=WHAT[name], measure=partial(under_policy, policy=policy))
        for name, policy in POLICIES.items()
    ]


def under_policy(case: Case, policy: MemoryPolicy) -> list[Measured]:
    """A step of a model with `policy` against the truth."""
    # A copy, since a policy is applied once and for good.
    model = copy.deepcopy(case.model)
    apply_memory(model, policy)
    return worst(case, [("unequal", apart(trained(model, case.steps["unequal"]), case.truths["unequal"]))])


# Promise 5, the loss: head and cross-entropy in chunks against all logits at once.


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
