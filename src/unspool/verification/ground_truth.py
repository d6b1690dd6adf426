"""Reference results from plain `transformers`: one document at a time, all logits, plain cross-entropy.

This code uses no training code of Unspool. It shifts labels itself. `transformers` has no HARPE, so its rotation is
written here with complex numbers.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from unspool.core.rng import rng_for
from unspool.data.packing.row import Row
from unspool.models.rotary import USES_INPUT_LENGTH
from unspool.rope.tables import global_parameters
from unspool.verification.fixtures import GRADIENT_DOCUMENT, RopeCase, Step
from unspool.verification.tolerance import DRAW_FROM, DRAWS

PER_HEAD = "unspool-verify-per-head"
STEP = "row"  # key of the whole step; each document has its own key


@dataclass(frozen=True)
class Outcome:
    """Mean losses in nats and gradients (on the CPU) of the whole step and of single documents."""

    losses: dict[str, float]
    grads: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences between two outcomes, and where they occur."""

    loss: float
    loss_where: str
    gradient: float
    gradient_where: str
    median: float  # median gradient error over weights


def plain_outcome(model: Any, step: Step, *, targets_only: bool = False) -> Outcome:
    """Losses of the step and each document, and gradients of the step and (with one row) of one document.

    `targets_only` computes logits only at targets, like training.
    """
    documents = [document for row in step.rows for document in _documents(row)]
    num_valid = sum(int((targets >= 0).sum()) for _, targets in documents)
    single = len(step.rows) == 1
    losses, grads, total = {}, {}, 0.0
    # This document comes first, before other gradients are added.
    order = sorted(range(len(documents)), key=lambda number: number != GRADIENT_DOCUMENT)
    with summed_gradients(model) as sums:
        for number in order:
            tokens, targets = documents[number]
            count = int((targets >= 0).sum())
            if not count:
                continue
            with _fresh_rotary(model):
                summed = _summed_loss(model, tokens[None], targets[None], targets_only=targets_only)
            (summed / num_valid).backward()  # type: ignore[no-untyped-call]
            total += summed.item()
            losses[f"document {number}"] = summed.item() / count
            if single and number == GRADIENT_DOCUMENT:
                alone = gradients(model, sums)
                grads[f"document {number}"] = {name: grad * (num_valid / count) for name, grad in alone.items()}
        losses[STEP], grads[STEP] = total / num_valid, gradients(model, sums)
    return Outcome(losses, grads)


def batched_outcome(model: Any, step: Step) -> Outcome:
    """Loss and gradient of the step, with all documents that have targets in one right-padded batch.

    This differs from one document at a time only by rounding, because larger matrix products sum in another order. If
    RoPE depends on the input length, a batch contains only documents of one length.
    """
    documents = [document for row in step.rows for document in _documents(row) if (document[1] >= 0).any()]
    num_valid = sum(int((targets >= 0).sum()) for _, targets in documents)
    by_length: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    one_length = global_parameters(model.config.to_dict())["rope_type"] in USES_INPUT_LENGTH
    for document in documents:
        by_length.setdefault(len(document[0]) if one_length else 0, []).append(document)
    total = 0.0
    with summed_gradients(model) as sums:
        for group in by_length.values():
            longest = max(len(tokens) for tokens, _ in group)
            # Attention is causal, so padding on the right needs no mask.
            tokens = np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens, _ in group])
            targets = np.stack([np.pad(labels, (0, longest - len(labels)), constant_values=-1) for _, labels in group])
            with _fresh_rotary(model):
                summed = _summed_loss(model, tokens, targets)
            (summed / num_valid).backward()  # type: ignore[no-untyped-call]
            total += summed.item()
    return Outcome({STEP: total / num_valid}, {STEP: gradients(model, sums)})


@contextmanager
def _fresh_rotary(model: Any) -> Iterator[None]:
    """Use a fresh copy of the rotary module, because `dynamic` remembers the longest input."""
    own = model.base_model.rotary_emb
    model.base_model.rotary_emb = copy.deepcopy(own)
    try:
        yield
    finally:
        model.base_model.rotary_emb = own


def exact_outcome(model: Any, step: Step) -> Outcome:
    """`plain_outcome` in float64. The model stays in float64 afterwards."""
    with Float64Mode():
        outcome = plain_outcome(model.double(), step)
    # One more rounding is negligible and halves the memory.
    grads = {of: {name: grad.float() for name, grad in each.items()} for of, each in outcome.grads.items()}
    return Outcome(outcome.losses, grads)


class Float64Mode(TorchFunctionMode):
    """Turns casts to fp32 in model code (norms, softmax, RoPE tables) into casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **named)


@contextmanager
def summed_gradients(model: Any) -> Iterator[dict[str, Tensor]]:
    """Sum gradients by name over all backward passes inside the block, in fp32 or float64 for any weight dtype."""
    sums: dict[str, Tensor] = {}

    def add(name: str, weight: Tensor) -> None:
        grad, weight.grad = weight.grad, None
        assert grad is not None
        if name in sums:
            sums[name] += grad
        else:
            sums[name] = grad.to(torch.promote_types(grad.dtype, torch.float32))

    hooks = [
        weight.register_post_accumulate_grad_hook(partial(add, name))
        for name, weight in model.named_parameters()
        if weight.requires_grad
    ]
    model.zero_grad(set_to_none=True)
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


def gradients(model: Any, sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy gradients to the CPU. Weights without a gradient get zeros, so that a lost gradient is detected."""
    return {
        name: sums[name].detach().cpu().clone() if name in sums else torch.zeros_like(weight, device="cpu")
        for name, weight in model.named_parameters()
    }


def compare(found: Outcome, truth: Outcome) -> Difference:
    """Largest relative error of a loss, and of a weight's gradient."""
    losses = [(abs(found.losses[name] - truth.losses[name]) / abs(truth.losses[name]), name) for name in found.losses]
    grads = {of: gradient_errors(found.grads[of], truth.grads[of]) for of in found.grads}
    named = [(error, f"{of}, {weight}") for of, errors in grads.items() for error, weight in errors]
    medians = [(median(error for error, _ in errors), of) for of, errors in grads.items()]
    return Difference(*worst(losses), *worst(named), worst(medians)[0])


def max_difference(first: Difference, second: Difference) -> Difference:
    """The larger error of each quantity."""
    loss = max((first.loss, first.loss_where), (second.loss, second.loss_where))
    gradient = max((first.gradient, first.gradient_where), (second.gradient, second.gradient_where))
    return Difference(*loss, *gradient, max(first.median, second.median))


def gradient_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[tuple[float, str]]:
    """(‖found − wanted‖ / ‖wanted‖, name) of every weight.

    Norms below a thousandth of the largest are raised to that value. Some gradients are the remainder of large terms
    that cancel, such as those of key biases, which the softmax ignores.
    """
    assert found.keys() == wanted.keys()
    norms = {name: _norm(grad) for name, grad in wanted.items()}
    floor = 1e-3 * max(norms.values())
    return [(_norm(found[name] - grad) / max(norms[name], floor), name) for name, grad in wanted.items()]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def worst(errors: list[tuple[float, str]]) -> tuple[float, str]:
    """The largest error and its location. NaN counts as the largest."""
    return max(errors, key=lambda error: math.inf if math.isnan(error[0]) else error[0], default=(0.0, ""))


def apply_rope_by_hand(model: Any, rope: RopeCase) -> None:
    """Apply the expected RoPE of a case to a plain model, without Unspool's code."""
    backbone, config = model.base_model, model.config
    if rope.parameters is not None:
        config.rope_parameters = rope.parameters
        backbone.rotary_emb = type(backbone.rotary_emb)(config).to(next(model.parameters()).device)
        for back, multiplier in enumerate(reversed(rope.multipliers), 1):
            backbone.rotary_emb.inv_freq[-back] *= multiplier
        return
    assert rope.bases is not None
    AttentionInterface.register(PER_HEAD, attend_per_head)
    config._attn_implementation = PER_HEAD
    backbone.rotary_emb = _NoRotary(config.head_dim)
    for layer, bases in zip(backbone.layers, rope.bases, strict=True):
        layer.self_attn.verify_bases = bases


def attend_per_head(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention that computes all scores, with one RoPE base per head."""
    groups = query.shape[1] // key.shape[1]
    rotations = torch.stack([_rotations(base, key.shape[2], key.shape[3], key.device) for base in module.verify_bases])
    query, key, value = (
        _rotate(query, rotations.repeat_interleave(groups, dim=0)).to(value.dtype),
        _rotate(key, rotations).to(value.dtype).repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
    )
    scores = (query @ key.transpose(2, 3)).float() * scaling
    future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def _rotations(base: float, length: int, head_dim: int, device: torch.device) -> Tensor:
    """exp(i · position · base^(−2j/d)), [positions, d/2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(device)


def _rotate(heads: Tensor, rotations: Tensor) -> Tensor:
    first, second = heads.double().chunk(2, dim=-1)
    rotated = torch.complex(first, second) * rotations
    return torch.cat((rotated.real, rotated.imag), dim=-1).float()


class _NoRotary(nn.Module):
    """Replaces a model's rotary module by no rotation: cosine 1, sine 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self.head_dim)
        return hidden.new_ones(shape), hidden.new_zeros(shape)


def _documents(row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets of each document. The target at i is the token at i + 1, or −1 without loss."""
    documents, begin = [], 0
    for doc_len in row.doc_lens.tolist():
        tokens = row.tokens[begin : begin + doc_len].astype(np.int64)
        has_loss = np.ones(doc_len, dtype=bool) if row.loss_mask is None else row.loss_mask[begin : begin + doc_len]
        targets = np.append(np.where(has_loss[1:], tokens[1:], -1), -1)
        documents.append((tokens, targets))
        begin += doc_len
    return documents


def _summed_loss(model: Any, tokens: np.ndarray, targets: np.ndarray, *, targets_only: bool = False) -> Tensor:
    """Sum of losses of documents [number, tokens]. `targets_only` needs a single document."""
    device = next(model.parameters()).device
    ids, wanted = (torch.from_numpy(array).to(device) for array in (tokens, targets))
    kept = {}
    if targets_only:
        (places,) = (wanted[0] >= 0).nonzero(as_tuple=True)
        kept, wanted = {"logits_to_keep": places}, wanted[:, places]
    logits = model(input_ids=ids, use_cache=False, **kept).logits
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum")


# The rounding error of plain `transformers` with several orders of summation


def rounding_error(model: Any, step: Step, truth: Outcome, *, targets_only: bool) -> Difference:
    """Error with one document at a time. With several rows, also with one batch, which rounds differently."""
    found = compare(plain_outcome(model, step, targets_only=targets_only), truth)
    return found if len(step.rows) == 1 else max_difference(found, compare(batched_outcome(model, step), truth))


def fp32_rounding_error(model: Any, step: Step, truth: Outcome, *, seed: int) -> Difference:
    """`rounding_error`. If it is not far below the tolerance, also sum in random orders."""
    found = rounding_error(model, step, truth, targets_only=True)
    if max(found.loss, found.gradient, found.median) < DRAW_FROM:
        return found
    for draw in range(DRAWS):
        with ReorderedSums(rng_for(seed, "verify", "sums", step.name, draw)):
            found = max_difference(found, compare(batched_outcome(model, step), truth))
    return found


class ReorderedSums(TorchFunctionMode):
    """Sums the terms of every product with a weight in random order, as if channels were permuted.

    Only rounding changes, also in the backward pass, which starts from other hidden states.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self._rng = rng

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        order = torch.from_numpy(self._rng.permutation(weight.shape[1])).to(weight.device)
        return F.linear(input.index_select(-1, order), weight.index_select(1, order), bias)
