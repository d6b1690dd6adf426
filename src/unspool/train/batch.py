"""Rows to one flat batch: a single sequence in which every document sees only itself.

Flattening makes one case of all: rows of one document, packed rows, several rows at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.data.labels import IGNORE, attended_lens, labels, position_ids
from unspool.data.store import Row


@dataclass(frozen=True, kw_only=True)
class Batch:
    tokens: Tensor  # int64[T]
    labels: Tensor  # int64[T]
    position_ids: Tensor  # int64[T]
    doc_lens: tuple[int, ...]  # attended lengths, summing to T
    row_ends: tuple[int, ...]  # where each row ends in T

    def to(self, device: torch.device) -> "Batch":
        moved = {
            name: getattr(self, name).to(device, non_blocking=True) for name in ("tokens", "labels", "position_ids")
        }
        return Batch(**moved, doc_lens=self.doc_lens, row_ends=self.row_ends)

    @property
    def model_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.tokens[None], "position_ids": self.position_ids[None], "doc_lens": self.doc_lens}


def build_batch(rows: Sequence[Row], *, attention: str) -> Batch:
    """`attention: full` makes every row one document; `documents` leaves rows marked full as they are."""
    lens = [attended_lens(row.doc_lens, "full" if attention == "full" else row.attention) for row in rows]
    return Batch(
        tokens=torch.from_numpy(np.concatenate([row.tokens for row in rows]).astype(np.int64)),
        labels=torch.from_numpy(np.concatenate([labels(row.tokens, row.doc_lens, row.loss_mask) for row in rows])),
        position_ids=torch.from_numpy(np.concatenate([position_ids(row_lens) for row_lens in lens])),
        doc_lens=tuple(int(doc_len) for row_lens in lens for doc_len in row_lens),
        row_ends=tuple(int(end) for end in np.cumsum([len(row.tokens) for row in rows])),
    )


def count_valid(batches: Sequence[Batch]) -> int:
    """Labels that carry loss, over all micro-batches of a step."""
    return sum(int((batch.labels != IGNORE).sum()) for batch in batches)
