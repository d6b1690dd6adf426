"""Build one flat batch from packed rows, and split it among sequence ranks.

A batch is a single sequence; tokens attend only within the spans of `doc_lens`. So rows of one document, packed rows
and several rows need no special cases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE, Row, attended_lens, labels, position_ids

RowWeights = Callable[[Row, np.ndarray], np.ndarray]
_TENSORS = ("tokens", "shift_labels", "position_ids", "weights")


@dataclass(frozen=True, kw_only=True)
class Batch:
    tokens: Tensor  # int64[T]
    shift_labels: Tensor  # int64[T]: the next token; not called `labels`, which other code would shift again
    position_ids: Tensor  # int64[T]
    doc_lens: tuple[int, ...]  # lengths of spans that attend to themselves, summing to T
    row_lens: tuple[int, ...]  # tokens of each row, summing to T
    num_valid: tuple[int, ...]  # labels of each row that carry loss
    rope_spans: tuple[tuple[int, int], ...]  # in token order: number of tokens, and length of their whole document
    weights: Tensor | None = None  # fp32[T], of each label's loss, 0 without loss; None: all labels weigh the same

    def to(self, device: torch.device) -> "Batch":
        """Copy to `device`, without waiting if the tensors are pinned."""
        return self._with({name: tensor.to(device, non_blocking=True) for name, tensor in self._tensors()})

    def pinned(self) -> "Batch":
        return self._with({name: tensor.pin_memory() for name, tensor in self._tensors()})

    def _with(self, tensors: dict[str, Any]) -> "Batch":
        return replace(self, **tensors)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name in _TENSORS if (tensor := getattr(self, name)) is not None]

    @property
    def row_weights(self) -> list[float]:
        """Sum of the weights of each row's labels; their number if all labels weigh the same."""
        if self.weights is None:
            return list(self.num_valid)
        return [float(weight) for weight in row_sums(self.weights, self.row_lens).tolist()]

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {
            "input_ids": self.tokens[None],
            "position_ids": self.position_ids[None],
            "doc_lens": self.doc_lens,
            "rope_spans": self.rope_spans,
        }


def build_batch(rows: Sequence[Row], *, attention: str, weigh: RowWeights | None = None) -> Batch:
    """Join rows to one batch; `attention="full"` makes every row one document, other values follow each row.

    `weigh` returns the weights of a row's labels, given the row and the lengths of its spans that attend to themselves.
    """
    tokens = np.concatenate([row.tokens for row in rows])
    row_lens = [len(row.tokens) for row in rows]
    # Every row ends at a document's end, so the labels of all rows can be computed at once.
    targets = labels(tokens, np.concatenate([row.doc_lens for row in rows]), _loss_mask(rows))
    attended = np.concatenate([attended_by(row, attention) for row in rows])
    if any(row.positions is not None for row in rows):
        positions = np.concatenate([_positions(row, attention) for row in rows])
    else:
        positions = position_ids(attended)
    valid = np.add.reduceat(targets != IGNORE, np.cumsum([0, *row_lens[:-1]]), dtype=np.int64)
    weights = None
    if weigh is not None:
        given = np.concatenate([weigh(row, attended_by(row, attention)) for row in rows])
        weights = torch.from_numpy(np.where(targets == IGNORE, 0, given).astype(np.float32))
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        shift_labels=torch.from_numpy(targets),
        position_ids=torch.from_numpy(positions),
        doc_lens=tuple(attended.tolist()),
        row_lens=tuple(row_lens),
        num_valid=tuple(valid.tolist()),
        rope_spans=_rope_spans(positions, attended),
        weights=weights,
    )


def _rope_spans(positions: np.ndarray, attended: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the length of every attended span for length-dependent RoPE: its largest position + 1."""
    lengths = np.maximum.reduceat(positions, np.cumsum(attended) - attended) + 1
    return tuple(zip(attended.tolist(), lengths.tolist(), strict=True))


def attended_by(row: Row, attention: str) -> np.ndarray:
    """Return the lengths of a row's spans that attend to themselves, in a stage with this `attention`."""
    return attended_lens(row.doc_lens, "full" if attention == "full" else row.attention)


def row_sums(losses: Tensor, row_lens: Sequence[int]) -> Tensor:
    """Return the sum of token losses per row in float64, without a transfer per row; 0 for a row of length 0."""
    ends = torch.tensor(row_lens).cumsum(0)
    if losses.is_cuda:
        # Copied from pinned memory; otherwise the host would wait for the whole backward pass.
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
    """Return the part of a batch that sequence rank `rank` of `degree` computes; `ring` ranks form a ring.

    Parts are equally long, and every label is in exactly one part. `doc_lens` are those of the whole batch, because
    attention works on whole rows. Rows without tokens in this part have length 0; padding belongs to the last row.
    """
    if degree == 1:
        return batch
    if ring > 1 and len(batch.doc_lens) > 1:
        raise ConfigError(
            f"parallel: ring={ring} needs rows of one document, but this batch holds {len(batch.doc_lens)}; use ring 1 "
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
        weights=None if padded.weights is None else padded.weights[own],
    )


def _own_spans(spans: tuple[tuple[int, int], ...], own: Tensor) -> tuple[tuple[int, int], ...]:
    counts, lengths = torch.tensor(spans).T
    own_lengths, own_counts = torch.unique_consecutive(lengths.repeat_interleave(counts)[own], return_counts=True)
    return tuple(zip(own_counts.tolist(), own_lengths.tolist(), strict=True))


def pad_batch(batch: Batch, unit: int, *, own_document: bool) -> Batch:
    """Pad `batch` to a multiple of `unit` with tokens that carry no loss.

    Padding is a separate document, which costs almost nothing, or the end of the last document, which no other token
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
        # Padding at the end of a document uses the document's frequencies and does not change them.
        rope_spans=(*batch.rope_spans, (extra, extra)) if own_document else (*spans_before, (count + extra, length)),
        weights=None if batch.weights is None else F.pad(batch.weights, (0, extra)),
    )


def sequence_part(length: int, rank: int, degree: int, *, ring: int = 1) -> Tensor:
    """Return int64[length / degree]: ascending indices of the tokens that `rank` computes.

    A ring splits the row into two pieces per rank. It pairs the first piece with the last, the second with the second
    to last, and so on, so that all ranks have equal work. Each pair is then split among the Ulysses ranks.
    """
    indices = torch.arange(length)
    if ring > 1:
        ring_rank, rank = divmod(rank, degree // ring)
        pieces = indices.view(2 * ring, -1)
        indices = torch.cat([pieces[ring_rank], pieces[2 * ring - 1 - ring_rank]])
    return indices.view(degree // ring, -1)[rank]
