"""What results should be: plain `transformers`, one document at a time, all logits at once, plain cross-entropy.

In: a model as `transformers` loads it, the rows of a step. Out: `Outcome`, losses and gradients by name.
Nothing of ours takes part: labels are cut by hand, and where `transformers` has no way to say it (a base per head) the
rotation is written out here with complex numbers.
"""

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
from unspool.data.packing.store import Row
from unspool.verification.families import Placed
from unspool.verification.tolerance import DRAW_FROM, DRAWS
from unspool.verification.training_rows import WATCHED, Step

PER_HEAD = "unspool-verify-per-head"
ROW = "row"


@dataclass(frozen=True)
class Outcome:
    """Mean losses in nats and gradients (on the CPU) of the whole step and of single documents."""

    losses: dict[str, float]
    grads: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Apart:
    """How far two outcomes are from each other, and where most."""

    loss: float
    loss_where: str
    gradient: float
    gradient_where: str
    middle: float  # the error of the gradient of half of the weights is below


def plain_outcome(model: Any, step: Step, *, asked_only: bool = False) -> Outcome:
    """Losses of the step and of each document; gradients of the step and, if it has one row, of a document.

    `asked_only`: no logits where nothing is asked for, as in training.
    """
    documents = [document for row in step.rows for document in _documents(row)]
    num_valid = sum(int((targets >= 0).sum()) for _, targets in documents)
    single = len(step.rows) == 1
    losses, grads, total = {}, {}, 0.0
    # The watched document first, while there is no other's gradient.
    order = sorted(range(len(documents)), key=lambda number: number != WATCHED)
    with summed_gradients(model) as sums:
        for number in order:
            tokens, targets = documents[number]
            count = int((targets >= 0).sum())
            if not count:
                continue
            summed = _summed_loss(model, tokens[None], targets[None], asked_only=asked_only)
            (summed / num_valid).backward()  # type: ignore[no-untyped-call]
            total += summed.item()
            losses[f"document {number}"] = summed.item() / count
            if single and number == WATCHED:
                alone = gradients(model, sums)
                grads[f"document {number}"] = {name: grad * (num_valid / count) for name, grad in alone.items()}
        losses[ROW], grads[ROW] = total / num_valid, gradients(model, sums)
    return Outcome(losses, grads)


def batched_outcome(model: Any, step: Step) -> Outcome:
    """Loss and gradient of the step with all documents that are asked for anything in one batch, padded on the right.

    The same numbers as one at a time, except for roundings: products of larger matrices add up in another order.
    """
    documents = [document for row in step.rows for document in _documents(row) if (document[1] >= 0).any()]
    longest = max(len(tokens) for tokens, _ in documents)
    # What comes after a document cannot be seen from within it, so no mask is needed.
    tokens = np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens, _ in documents])
    targets = np.stack([np.pad(targets, (0, longest - len(targets)), constant_values=-1) for _, targets in documents])
    num_valid = int((targets >= 0).sum())
    with summed_gradients(model) as sums:
        summed = _summed_loss(model, tokens, targets)
        (summed / num_valid).backward()  # type: ignore[no-untyped-call]
    return Outcome({ROW: summed.item() / num_valid}, {ROW: gradients(model, sums)})


def exact_outcome(model: Any, step: Step) -> Outcome:
    """The same in float64 throughout; the model is float64 afterwards."""
    with Doubled():
        outcome = plain_outcome(model.double(), step)
    # Rounded once, which is nothing beside what is measured, and half the memory.
    grads = {of: {name: grad.float() for name, grad in each.items()} for of, each in outcome.grads.items()}
    return Outcome(outcome.losses, grads)


class Doubled(TorchFunctionMode):
    """Makes float64 of what model code turns into fp32, as norms, softmax and rotary tables do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **named)


@contextmanager
def summed_gradients(model: Any) -> Iterator[dict[str, Tensor]]:
    """The gradients of all backward passes inside by name, added up in fp32 or better, whatever the weights are."""
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
    """A copy; a weight that got none counts as zero, so that losing one is seen."""
    return {
        name: sums[name].detach().cpu().clone() if name in sums else torch.zeros_like(weight, device="cpu")
        for name, weight in model.named_parameters()
    }


def apart(found: Outcome, truth: Outcome) -> Apart:
    """The largest relative difference of a loss, and of one weight's gradient."""
    losses = [(abs(found.losses[name] - truth.losses[name]) / abs(truth.losses[name]), name) for name in found.losses]
    grads = {of: gradient_errors(found.grads[of], truth.grads[of]) for of in found.grads}
    named = [(error, f"{of}, {weight}") for of, errors in grads.items() for error, weight in errors]
    middles = [(median(error for error, _ in errors), of) for of, errors in grads.items()]
    return Apart(*worst(losses), *worst(named), worst(middles)[0])


def larger(first: Apart, second: Apart) -> Apart:
    """The larger error of each."""
    loss = max((first.loss, first.loss_where), (second.loss, second.loss_where))
    gradient = max((first.gradient, first.gradient_where), (second.gradient, second.gradient_where))
    return Apart(*loss, *gradient, max(first.middle, second.middle))


def gradient_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[tuple[float, str]]:
    """‖found − wanted‖ / ‖wanted‖ of every weight, with its name.

    Some gradients are what is left when large terms cancel (biases of keys: a softmax does not see them), so a norm
    below a thousandth of the largest counts as that.
    """
    assert found.keys() == wanted.keys()
    norms = {name: _norm(grad) for name, grad in wanted.items()}
    floor = 1e-3 * max(norms.values())
    return [(_norm(found[name] - grad) / max(norms[name], floor), name) for name, grad in wanted.items()]


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def worst(errors: list[tuple[float, str]]) -> tuple[float, str]:
    """The largest error and where it is; one that is not a number is larger than all others."""
    return max(errors, key=lambda error: math.inf if math.isnan(error[0]) else error[0], default=(0.0, ""))


def place_positions(model: Any, placed: Placed) -> None:
    """Give a plain model the positions that `placed` names, without our code."""
    backbone, config = model.base_model, model.config
    if placed.rope is not None:
        config.rope_parameters = placed.rope
        backbone.rotary_emb = type(backbone.rotary_emb)(config).to(next(model.parameters()).device)
        return
    assert placed.bases is not None
    AttentionInterface.register(PER_HEAD, attend_per_head)
    config._attn_implementation = PER_HEAD
    backbone.rotary_emb = _Unrotated(config.head_dim)
    for layer, bases in zip(backbone.layers, placed.bases, strict=True):
        layer.self_attn.verify_bases = bases


def attend_per_head(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention with all scores, every head turned by its own base."""
    groups = query.shape[1] // key.shape[1]
    turns = torch.stack([_turns(base, key.shape[2], key.shape[3], key.device) for base in module.verify_bases])
    query, key, value = (
        _turn(query, turns.repeat_interleave(groups, dim=0)).to(value.dtype),
        _turn(key, turns).to(value.dtype).repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
    )
    scores = (query @ key.transpose(2, 3)).float() * scaling
    future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
    shares = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
    return (shares.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def _turns(base: float, length: int, head_dim: int, device: torch.device) -> Tensor:
    """exp(i · position · base^(−2j/d)), [positions, d/2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(device)


def _turn(heads: Tensor, turns: Tensor) -> Tensor:
    first, second = heads.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * turns
    return torch.cat((turned.real, turned.imag), dim=-1).float()


class _Unrotated(nn.Module):
    """In the place of the model's own rotary module: cosine 1, sine 0."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        shape = (*position_ids.shape, self.head_dim)
        return hidden.new_ones(shape), hidden.new_zeros(shape)


def _documents(row: Row) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets of each document; the target at i is the token at i + 1, −1 where nothing is asked for."""
    documents, begin = [], 0
    for doc_len in row.doc_lens.tolist():
        tokens = row.tokens[begin : begin + doc_len].astype(np.int64)
        asked = np.ones(doc_len, dtype=bool) if row.loss_mask is None else row.loss_mask[begin : begin + doc_len]
        targets = np.append(np.where(asked[1:], tokens[1:], -1), -1)
        documents.append((tokens, targets))
        begin += doc_len
    return documents


def _summed_loss(model: Any, tokens: np.ndarray, targets: np.ndarray, *, asked_only: bool = False) -> Tensor:
    """Of documents [number, tokens] of one length; of one document if only what is `asked_only` gets logits."""
    device = next(model.parameters()).device
    ids, wanted = (torch.from_numpy(array).to(device) for array in (tokens, targets))
    kept = {}
    if asked_only:
        (asked,) = (wanted[0] >= 0).nonzero(as_tuple=True)
        kept, wanted = {"logits_to_keep": asked}, wanted[:, asked]
    logits = model(input_ids=ids, use_cache=False, **kept).logits
    return F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum")


# How far plain `transformers` is from the truth by rounding alone, over several ways to round.


def usual_error(model: Any, step: Step, truth: Outcome, *, asked_only: bool) -> Apart:
    """Documents one at a time; if they are several rows also all in one batch, as products of larger matrices round
    otherwise."""
    found = apart(plain_outcome(model, step, asked_only=asked_only), truth)
    return found if len(step.rows) == 1 else larger(found, apart(batched_outcome(model, step), truth))


def fp32_error(model: Any, step: Step, truth: Outcome, *, seed: int) -> Apart:
    """The same and, where it is not far below what is allowed anyway, with sums in orders drawn by the seed."""
    found = usual_error(model, step, truth, asked_only=True)
    if max(found.loss, found.gradient, found.middle) < DRAW_FROM:
        return found
    for draw in range(DRAWS):
        with Reordered(rng_for(seed, "verify", "sums", step.name, draw)):
            found = larger(found, apart(batched_outcome(model, step), truth))
    return found


class Reordered(TorchFunctionMode):
    """Every product with a weight adds up its terms in a drawn order, as if channels were numbered otherwise.

    The same numbers, except for roundings. Those of the backward pass change as well, with the states it starts from.
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
