"""Packed rows to one flat batch, and the parts of it that sequence ranks compute.

A batch is a single sequence, in which `doc_lens` separate what may attend to each other. So rows of one document,
packed rows and several rows at once need no special cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE, Row, attended_lens, labels, position_ids

_TENSORS = ("tokens", "shift_labels", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Batch:
    tokens: Tensor  # int64[T]
    shift_labels: Tensor  # int64[T]: the token after each; not called `labels`, which others would shift again
    position_ids: Tensor  # int64[T]
    doc_lens: tuple[int, ...]  # attended lengths, summing to T
    row_lens: tuple[int, ...]  # tokens of each row, summing to T
    num_valid: tuple[int, ...]  # labels of each row that carry loss
    rope_spans: tuple[tuple[int, int], ...]  # tokens in order: how many, and the positions of their whole document

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`, without waiting if the arrays are pinned."""
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS})

    def pinned(self) -> "Batch":
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _TENSORS})

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.tokens[None],
            "position_ids": self.position_ids[None],
            "doc_lens": self.doc_lens,
            "rope_spans": self.rope_spans,
        }


def build_batch(rows: Sequence[Row], *, attention: str) -> Batch:
    """`attention: full` makes every row one document; `documents` leaves rows marked full as they are."""
    tokens = np.concatenate([row.tokens for row in rows])
    row_lens = [len(row.tokens) for row in rows]
    # Every row ends with a document, so the labels of all rows can be made at once.
    targets = labels(tokens, np.concatenate([row.doc_lens for row in rows]), _loss_mask(rows))
    attended = np.concatenate([attended_by(row, attention) for row in rows])
    if any(row.positions is not None for row in rows):
        positions = np.concatenate([_positions(row, attention) for row in rows])
    else:
        positions = position_ids(attended)
    valid = np.add.reduceat(targets != IGNORE, np.cumsum([0, *row_lens[:-1]]), dtype=np.int64)
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        shift_labels=torch.from_numpy(targets),
        position_ids=torch.from_numpy(positions),
        doc_lens=tuple(attended.tolist()),
        row_lens=tuple(row_lens),
        num_valid=tuple(valid.tolist()),
        rope_spans=_rope_spans(positions, attended),
    )


def _rope_spans(positions: np.ndarray, attended: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Largest position + 1 of every span that attends to itself: what length-dependent RoPE calls its length."""
    lengths = np.maximum.reduceat(positions, np.cumsum(attended) - attended) + 1
    return tuple(zip(attended.tolist(), lengths.tolist(), strict=True))


def attended_by(row: Row, attention: str) -> np.ndarray:
    """Lengths of the spans of a row that attend to themselves, in a stage with this `attention`."""
    return attended_lens(row.doc_lens, "full" if attention == "full" else row.attention)


def row_sums(losses: Tensor, row_lens: Sequence[int]) -> Tensor:
    """Sum of token losses by row in float64, without a transfer per row; 0 for a row of length 0."""
    ends = torch.tensor(row_lens).cumsum(0)
    if losses.is_cuda:
        # From pinned memory, or the host would wait here for the whole backward pass.
        ends = ends.pin_memory().to(losses.device, non_blocking=True)
    until = F.pad(losses.double().cumsum(0), (1, 0))[ends]
    return torch.diff(until, prepend=until.new_zeros(1))


def _positions(row: Row, attention: str) -> np.ndarray:
    if row.positions is not None:
        return row.positions.astype(np.int64)
    return position_ids(attended_by(row, attention))


def _loss_mask(rows: Sequence[Row]) -> np.ndarray | None:
    if all(row.loss_mask is None for row in rows):
        return None
    return np.concatenate(
        [np.ones(len(row.tokens), dtype=bool) if row.loss_mask is None else row.loss_mask for row in rows]
    )


# Sequence parallelism


def split_batch(batch: Batch, rank: int, degree: int, *, ring: int = 1) -> Batch:
    """The part of a batch that sequence rank `rank` of `degree` computes; `ring` of them form a ring.

    Parts are equally long, and every label is in exactly one of them. `doc_lens` stay those of the whole batch, because
    attention works on whole rows. Rows without tokens in this part have length 0; padding belongs to the last row.
    """
    if degree == 1:
        return batch
    if ring > 1 and len(batch.doc_lens) > 1:
        raise ConfigError(
            f"parallel: ring={ring} needs rows of one document, and this batch holds {len(batch.doc_lens)}; use ring 1 "
            "and ulysses, or attention: full with one row per micro-batch."
        )
    padded = pad_batch(batch, degree * (2 if ring > 1 else 1), own_document=ring == 1)
    own = sequence_part(len(padded.tokens), rank, degree, ring=ring)
    num_rows = len(batch.row_lens)
    row_of = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(padded.row_lens))[own]
    shift_labels = padded.shift_labels[own]
    return Batch(
        tokens=padded.tokens[own],
        shift_labels=shift_labels,
        position_ids=padded.position_ids[own],
        doc_lens=padded.doc_lens,
        row_lens=tuple(torch.bincount(row_of, minlength=num_rows).tolist()),
        num_valid=tuple(torch.bincount(row_of[shift_labels != IGNORE], minlength=num_rows).tolist()),
        rope_spans=_own_spans(padded.rope_spans, own),
    )


def _own_spans(spans: tuple[tuple[int, int], ...], own: Tensor) -> tuple[tuple[int, int], ...]:
    counts, lengths = torch.tensor(spans).T
    own_lengths, own_counts = torch.unique_consecutive(lengths.repeat_interleave(counts)[own], return_counts=True)
    return tuple(zip(own_counts.tolist(), own_lengths.tolist(), strict=True))


def pad_batch(batch: Batch, unit: int, *, own_document: bool) -> Batch:
    """Pad `batch` to a multiple of `unit` with tokens that carry no loss.

    Padding is a document of its own, which costs next to nothing, or the end of the last document, which no other token
    attends to.
    """
    extra = -len(batch.tokens) % unit
    if not extra:
        return batch
    *before, last = batch.doc_lens
    *spans_before, (count, length) = batch.rope_spans
    return Batch(
        tokens=F.pad(batch.tokens, (0, extra)),
        shift_labels=F.pad(batch.shift_labels, (0, extra), value=IGNORE),
        position_ids=torch.cat([batch.position_ids, torch.arange(extra)]),
        doc_lens=(*before, last, extra) if own_document else (*before, last + extra),
        row_lens=(*batch.row_lens[:-1], batch.row_lens[-1] + extra),
        num_valid=batch.num_valid,
        # At the end of a document, padding gets that document's frequencies and does not change them.
        rope_spans=(*batch.rope_spans, (extra, extra)) if own_document else (*spans_before, (count + extra, length)),
    )


def sequence_part(length: int, rank: int, degree: int, *, ring: int = 1) -> Tensor:
    """int64[length / degree]: indices of the tokens that `rank` computes, ascending.

    A ring cuts the row into two pieces per rank and pairs the first with the last, the second with the last but one,
    and so on, so that all ranks attend to equally many tokens. Each pair is then cut among the Ulysses ranks.
    """
    indices = torch.arange(length)
    if ring > 1:
        ring_rank, rank = divmod(rank, degree // ring)
        pieces = indices.view(2 * ring, -1)
        indices = torch.cat([pieces[ring_rank], pieces[2 * ring - 1 - ring_rank]])
    return indices.view(degree // ring, -1)[rank]
