"""Promise 1: packing changes neither a document's loss nor its gradient; no document reaches another."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.core.rng import rng_for
from unspool.data.packing.store import Row
from unspool.training.batch import Batch, build_batch
from unspool.verification.case import Case, trained, trained_document
from unspool.verification.ground_truth import Apart, apart
from unspool.verification.results import Measured, SkippedError
from unspool.verification.tolerance import EXACT, shifted
from unspool.verification.training_rows import WATCHED, with_tokens

SHIFT = 64


def packed(case: Case) -> list[Measured]:
    """Documents trained in one row against each alone in plain `transformers`."""
    found: list[tuple[str, Apart]] = []
    for name in sorted(case.steps.keys() & {"unequal", "equal"}):
        step, truth = case.steps[name], case.truths[name]
        found.append((name, apart(trained(case.model, step), truth)))
        for number in range(len(step.rows[0].doc_lens)):
            # Equal documents only differ in where they stand: one of them is enough.
            if f"document {number}" in truth.losses and (name == "unequal" or number == WATCHED):
                outcome = trained_document(case.model, step, number, gradient=number == WATCHED)
                found.append((name, apart(outcome, truth)))
    return [*worst(case, found), _restarted(case)]


def alone(case: Case) -> list[Measured]:
    """Another text in one document: what the others say must be the same to the last bit.

    And the other way round: the loss of one document must have no slope at all in what the others are made of.
    """
    (row,) = case.steps["unequal"].rows
    begin = int(row.doc_lens[:WATCHED].sum())
    own = slice(begin, begin + int(row.doc_lens[WATCHED]))
    rng = rng_for(case.seed, "verify", "perturbed")
    other = (row.tokens[own] + rng.integers(1, case.model.config.vocab_size - 1)) % case.model.config.vocab_size
    before, _ = _states(case, row)
    after, _ = _states(case, with_tokens(row, WATCHED, other.astype(np.uint32)))
    changed = (before - after).abs().float()
    if not float(changed[own].max()) > 0:
        raise SkippedError(
            "the changed document says the same as before, so that nothing can be learned from the others"
        )
    changed[own] = 0
    states, slopes_of = _states(case, row, slopes=True)
    (slope,) = torch.autograd.grad(states[own].float().square().sum(), slopes_of)
    slope = slope[0].abs().float().clone()
    slope[own] = 0
    return [
        Measured(
            quantity="states",
            error=float(changed.max()),
            tolerance=EXACT,
            detail=_document_at(row, int(changed.amax(dim=1).argmax())),
        ),
        Measured(
            quantity="slope",
            error=float(slope.max()),
            tolerance=EXACT,
            detail=_document_at(row, int(slope.amax(dim=1).argmax())),
        ),
    ]


def moved(case: Case) -> list[Measured]:
    """All positions of a document raised by the same number: RoPE only knows distances, so nothing changes."""
    rope: dict[str, Any] = case.model.config.rope_parameters
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise SkippedError(f"{rope['rope_type']} frequencies change with the highest position")
    (row,) = case.steps["unequal"].rows
    tokens = torch.from_numpy(row.tokens[: row.doc_lens[0]].astype(np.int64)).to(case.device)[None]
    positions = torch.arange(tokens.shape[1], device=case.device)[None]
    backbone = case.model_in_fp32().base_model
    with torch.no_grad():
        here, there = (
            backbone(input_ids=tokens, position_ids=positions + shift, use_cache=False).last_hidden_state
            for shift in (0, SHIFT)
        )
    error = float((here - there).norm() / here.norm())
    return [Measured(quantity="states", error=error, tolerance=shifted(tokens.shape[1] + SHIFT))]


def _restarted(case: Case) -> Measured:
    """Positions begin at 0 in every document. Results would hardly show it, since RoPE only knows distances, until a
    row reaches positions that the model was never trained on."""
    (row,) = case.steps["unequal"].rows
    found = build_batch([row], attention="intra_document").position_ids.numpy()
    wanted = np.concatenate([np.arange(doc_len) for doc_len in row.doc_lens.tolist()])
    return _measured("positions", float(np.abs(found - wanted).max()), EXACT, "")


def worst(case: Case, found: list[tuple[str, Apart]]) -> list[Measured]:
    """Of several steps, the one that comes nearest to its tolerance, or furthest beyond."""
    losses, grads = [], []
    for step, far in found:
        tolerances = case.tolerances(step)
        losses.append(_measured("loss", far.loss, tolerances.loss, f"{step}: {far.loss_where}"))
        grads.append(_measured("gradient", far.gradient, tolerances.gradient, f"{step}: {far.gradient_where}"))
        grads.append(_measured("gradient", far.middle, tolerances.middle, f"{step}: half of the weights"))
    return [_nearest_to_failing(losses), _nearest_to_failing(grads)]


def _nearest_to_failing(each: list[Measured]) -> Measured:
    return max(each, key=lambda one: math.inf if math.isnan(one.error) else one.error / one.tolerance)


def _measured(quantity: str, error: float, tolerance: float, detail: str) -> Measured:
    return Measured(quantity=quantity, error=error, tolerance=tolerance, detail=detail)


def _states(case: Case, row: Row, *, slopes: bool = False) -> tuple[Tensor, Tensor]:
    """The last states [T, D] of a packed row, in the precision of training, and the embeddings they depend on."""
    batch: Batch = build_batch([row], attention="intra_document").to(case.device)
    inputs = batch.model_inputs
    embedded = case.model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_(slopes)
    with torch.set_grad_enabled(slopes):
        states = case.model.base_model(inputs_embeds=embedded, use_cache=False, **inputs).last_hidden_state[0]
    return states, embedded


def _document_at(row: Row, place: int) -> str:
    return f"document {int(np.searchsorted(np.cumsum(row.doc_lens), place, side='right'))}"
