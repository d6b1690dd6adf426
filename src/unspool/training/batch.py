"""Rows to one flat batch: a single sequence in which every document sees only itself.

Flattening makes one case of all: rows of one document, packed rows, several rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.data.packing.row import IGNORE, Row, attended_lens, labels, position_ids

_TENSORS = ("tokens", "labels", "position_ids")


@dataclass(frozen=True, kw_only=True)
class Batch:
    tokens: Tensor  # int64[T]
    labels: Tensor  # int64[T]
    position_ids: Tensor  # int64[T]
    doc_lens: tuple[int, ...]  # attended lengths, summing to T
    row_lens: tuple[int, ...]  # tokens of each row, summing to T
    num_valid: tuple[int, ...]  # labels of each row that carry loss

    def to(self, device: torch.device) -> "Batch":
        """Without waiting for the copy where the arrays are pinned."""
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS})

    def pinned(self) -> "Batch":
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _TENSORS})

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.tokens[None], "position_ids": self.position_ids[None], "doc_lens": self.doc_lens}


def build_batch(rows: Sequence[Row], *, attention: str) -> Batch:
    """`attention: full` makes every row one document; `documents` leaves rows marked full as they are."""
    tokens = np.concatenate([row.tokens for row in rows])
    row_lens = [len(row.tokens) for row in rows]
    # Every row ends with a document, so the labels of all rows can be made at once.
    targets = labels(tokens, np.concatenate([row.doc_lens for row in rows]), _loss_mask(rows))
    attended = np.concatenate([attended_by(row, attention) for row in rows])
    if any(row.positions is not None for row in rows):
        places = np.concatenate([_positions(row, attention) for row in rows])
    else:
        places = position_ids(attended)
    valid = np.add.reduceat(targets != IGNORE, np.cumsum([0, *row_lens[:-1]]), dtype=np.int64)
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        labels=torch.from_numpy(targets),
        position_ids=torch.from_numpy(places),
        doc_lens=tuple(attended.tolist()),
        row_lens=tuple(row_lens),
        num_valid=tuple(valid.tolist()),
    )


def attended_by(row: Row, attention: str) -> np.ndarray:
    """The lengths that a row's attention goes by in a stage of this `attention`."""
    return attended_lens(row.doc_lens, "full" if attention == "full" else row.attention)


def row_sums(losses: Tensor, row_lens: Sequence[int]) -> Tensor:
    """Sum of token losses by row, float64, without a transfer per row; 0 for a row of which nothing is here."""
    ends = torch.tensor(row_lens, device=losses.device).cumsum(0)
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
