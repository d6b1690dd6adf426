"""Promises 1 and 2: packing, micro-batches and row order change neither loss nor gradient."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from unspool.core.rng import rng_for
from unspool.data.packing.row import Row
from unspool.training.batch import build_batch
from unspool.training.losses.base import LossWeights
from unspool.verification.case import Case, Measured, SkippedError, train_document, train_outcome
from unspool.verification.fixtures import GRADIENT_DOCUMENT, NUM_ROWS, with_tokens
from unspool.verification.ground_truth import Difference, compare
from unspool.verification.tolerance import EXACT, shift_tolerance

SHIFT = 64
LABEL_WEIGHT = 0.375


def check_packing(case: Case) -> list[Measured]:
    """Compare documents in a packed row with each document alone in plain `transformers`."""
    found: list[tuple[str, Difference]] = []
    for name in sorted(case.steps.keys() & {"unequal", "equal"}):
        step, truth = case.steps[name], case.truths[name]
        found.append((name, compare(train_outcome(case.model, step), truth)))
        for number in range(len(step.rows[0].doc_lens)):
            # Equal documents differ only in their place in the row, so one of them is enough.
            if f"document {number}" in truth.losses and (name == "unequal" or number == GRADIENT_DOCUMENT):
                outcome = train_document(case.model, step, number, gradient=number == GRADIENT_DOCUMENT)
                found.append((name, compare(outcome, truth)))
    # RoPE depends only on distances, so a loss barely changes if positions do not restart.
    (row,) = case.steps["unequal"].rows
    positions = build_batch([row], attention="intra_document").position_ids.numpy()
    wanted = np.concatenate([np.arange(doc_len) for doc_len in row.doc_lens.tolist()])
    error = float(np.abs(positions - wanted).max())
    return [*case.measure(found), Measured(quantity="positions", error=error, tolerance=EXACT)]


def check_isolation(case: Case) -> list[Measured]:
    """Replace the text of one document: the hidden states of all others must be bitwise equal.

    The gradient of one document's output with respect to other documents' inputs must also be zero.
    """
    (row,) = case.steps["unequal"].rows
    begin = int(row.doc_lens[:GRADIENT_DOCUMENT].sum())
    own = slice(begin, begin + int(row.doc_lens[GRADIENT_DOCUMENT]))
    vocabulary = case.model.config.vocab_size
    rng = rng_for(case.seed, "verify", "perturbed")
    other = (row.tokens[own] + rng.integers(1, vocabulary - 1)) % vocabulary
    before, _ = _hidden_states(case, row)
    after, _ = _hidden_states(case, with_tokens(row, GRADIENT_DOCUMENT, other.astype(np.uint32)))
    changed = (before - after).abs().float()
    if not float(changed[own].max()) > 0:
        raise SkippedError("replacing a document does not change its own output, so the check proves nothing")
    states, embedded = _hidden_states(case, row, with_grad=True)
    (grad,) = torch.autograd.grad(states[own].float().square().sum(), embedded)
    leaks = {"hidden states": changed, "input gradient": grad[0].abs().float().clone()}
    measured = []
    for quantity, leak in leaks.items():
        leak[own] = 0
        place = int(leak.amax(dim=1).argmax())
        document = int(np.searchsorted(np.cumsum(row.doc_lens), place, side="right"))
        measured.append(
            Measured(quantity=quantity, error=float(leak.max()), tolerance=EXACT, detail=f"document {document}")
        )
    return measured


def check_position_shift(case: Case) -> list[Measured]:
    """Add an offset to all positions of a document. RoPE depends only on distances, so outputs must not change."""
    (row,) = case.steps["unequal"].rows
    tokens = torch.from_numpy(row.tokens[: row.doc_lens[0]].astype(np.int64)).to(case.device)[None]
    positions = torch.arange(tokens.shape[1], device=case.device)[None]
    # Same length for both, because some RoPE methods depend on it.
    length = {"doc_lens": (tokens.shape[1],), "rope_spans": ((tokens.shape[1], tokens.shape[1] + SHIFT),)}
    backbone = case.model_in_fp32().base_model
    with torch.no_grad():
        original, shifted = (
            backbone(input_ids=tokens, position_ids=positions + shift, use_cache=False, **length).last_hidden_state
            for shift in (0, SHIFT)
        )
    error = float((original - shifted).norm() / original.norm())
    return [Measured(quantity="hidden states", error=error, tolerance=shift_tolerance(tokens.shape[1] + SHIFT))]


def check_micro_batches(case: Case) -> list[Measured]:
    """Compute eight rows in micro-batches of 1, 4 and 8. Some rows have a loss on only 10% of their tokens."""
    return _compare_splits(case, [(count, range(NUM_ROWS)) for count in (1, 4, 8)])


def check_row_order(case: Case) -> list[Measured]:
    """Compute the same rows in reverse and in random order."""
    order = rng_for(case.seed, "verify", "order").permutation(NUM_ROWS).tolist()
    return _compare_splits(case, [(1, range(NUM_ROWS)[::-1]), (2, order)])


class _MaskAsWeights(LossWeights):
    """Weights of the labels of `rows` without their masks: LABEL_WEIGHT, and 0 where the mask leaves a label out."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._masks = [row.loss_mask for row in rows]
        self.rows = tuple(replace(row, loss_mask=None) for row in rows)

    def of_row(self, row: Row, spans: np.ndarray) -> np.ndarray:
        (mask,) = (mask for mask, own in zip(self._masks, self.rows, strict=True) if own is row)
        counted = np.ones(len(row.tokens)) if mask is None else np.append(mask[1:], False)
        return LABEL_WEIGHT * counted.astype(np.float32)


def check_loss_weights(case: Case) -> list[Measured]:
    """Weigh labels instead of masking them: the sum of weight · loss by the sum of weights must be the masked mean."""
    weights, truth = _MaskAsWeights(case.steps["several"].rows), case.truths["several"]
    step = replace(case.steps["several"], rows=weights.rows)
    found = [
        compare(train_outcome(case.model, step, rows_at_once=count, loss_weights=weights), truth) for count in (1, 4, 8)
    ]
    return case.measure([("several", difference) for difference in found])


def _compare_splits(case: Case, splits: list[tuple[int, Sequence[int]]]) -> list[Measured]:
    """Compare splits, given as (rows per micro-batch, order of all rows)."""
    step, truth = case.steps["several"], case.truths["several"]
    found = [
        compare(train_outcome(case.model, step, rows_at_once=count, order=order), truth) for count, order in splits
    ]
    return case.measure([("several", difference) for difference in found])


def _hidden_states(case: Case, row: Row, *, with_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Last hidden states [T, D] of a packed row in training precision, and its input embeddings."""
    inputs = build_batch([row], attention="intra_document").to(case.device).model_inputs
    embedded = case.model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_(with_grad)
    with torch.set_grad_enabled(with_grad):
        states = case.model.base_model(inputs_embeds=embedded, use_cache=False, **inputs).last_hidden_state[0]
    return states, embedded
