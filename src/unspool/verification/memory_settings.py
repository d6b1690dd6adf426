"""Promise 5: with memory settings and chunked loss, loss and gradient equal those of plain `transformers`."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.data.packing.row import IGNORE
from unspool.models.loss import Head, read_head, summed_loss
from unspool.models.memory.checkpointing import apply_memory
from unspool.models.memory.policy import MemoryPolicy
from unspool.verification.case import Case, Check, Measured, train_outcome
from unspool.verification.ground_truth import Float64Mode, compare
from unspool.verification.tolerance import tolerance_for

# No row length is a multiple of this tile size, so the last tile is shorter.
TILE = 37
_FULL, _KEEP_ATTENTION = {"activation_checkpointing": "full"}, {"activation_checkpointing": "keep-attention"}
# Check name: (description for --list, policy).
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "activation-checkpointing": ("activation checkpointing of every layer", _FULL),
    "keep-attention": ("activation checkpointing that keeps attention outputs", _KEEP_ATTENTION),
    "keep-products": (
        "also keeps the matrix products of two layers, those of one layer in host memory",
        _KEEP_ATTENTION | {"keep_products": 2, "keep_on_host": 1},
    ),
    "layers-per-checkpoint": ("two layers per activation checkpoint", _FULL | {"layers_per_checkpoint": 2}),
    "offload": ("activation checkpoints in host memory", _FULL | {"offload": True}),
    "mlp-tiles": (f"norms and MLPs over {TILE} tokens at a time", {"mlp_tiles": TILE}),
    "heads-at-once": ("attention over one KV head at a time", {"attention_heads_at_once": 1}),
    "all-memory": (
        "all of these together",
        _KEEP_ATTENTION
        | {"layers_per_checkpoint": 2, "offload": True, "mlp_tiles": TILE, "attention_heads_at_once": 1},
    ),
}


def policy_checks() -> list[Check]:
    return [
        Check(name, 5, what, partial(check_policy, policy=MemoryPolicy(**settings)))
        for name, (what, settings) in POLICIES.items()
    ]


def check_policy(case: Case, policy: MemoryPolicy) -> list[Measured]:
    """Compare a step under a memory policy with plain `transformers`."""
    # Use a copy, because a policy cannot be removed from a model.
    model = copy.deepcopy(case.model)
    apply_memory(model, policy)
    found = compare(train_outcome(model, case.steps["unequal"]), case.truths["unequal"])
    return case.measure([("unequal", found)])


TOKENS = 33
CHUNK = 7  # the last chunk is shorter


def check_chunked_loss(case: Case) -> list[Measured]:
    """Compare the chunked loss and its gradients with all logits at once. Uses fp32 on all devices."""
    head = _in(read_head(case.model), torch.float32, case.device)
    generator = torch.Generator().manual_seed(case.seed)
    hidden = torch.randn(TOKENS, head.weight.shape[1], generator=generator).to(case.device)
    labels = torch.randint(len(head.weight), (TOKENS,), generator=generator).to(case.device)
    labels[::5] = IGNORE
    with Float64Mode():
        # On the CPU, because a large float64 head and the model may not fit together.
        wanted = _plain(hidden.cpu().double(), _in(head, torch.float64, "cpu"), labels.cpu(), at_once=TOKENS)
    plain = [_relative_errors(_plain(hidden, head, labels, at_once=count), wanted) for count in (TOKENS, CHUNK)]
    found = _relative_errors(_chunked(hidden, head, labels), wanted)
    names = ("loss", "gradient", "head gradient")
    return [
        Measured(quantity=name, error=error, tolerance=tolerance_for(max(errors), "fp32"))
        for name, error, *errors in zip(names, found, *plain, strict=True)
    ]


def _in(head: Head, dtype: torch.dtype, device: torch.device | str) -> Head:
    bias = None if head.bias is None else head.bias.to(device, dtype)
    return replace(head, weight=head.weight.to(device, dtype), bias=bias)


def _plain(hidden: Tensor, head: Head, labels: Tensor, *, at_once: int) -> list[Tensor]:
    """Cross-entropy, computed on the logits of `at_once` targets at a time."""
    states, head = _with_gradients(hidden, head)
    targets = (labels != IGNORE).nonzero()[:, 0]
    losses = [
        F.cross_entropy(head.logits(states[rows]), labels[rows], reduction="sum")
        for rows in torch.split(targets, at_once)
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
    # Scale the loss, because a step divides by its number of targets.
    (total / 3).backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None and head.weight.grad is not None
    return [total.detach(), states.grad, head.weight.grad]


def _relative_errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [float((mine.cpu() - full).norm() / full.norm()) for mine, full in zip(found, wanted, strict=True)]
