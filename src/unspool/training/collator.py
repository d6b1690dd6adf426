"""Collate packed rows for any trainer: `transformers.Trainer`, TRL, Accelerate, Lightning or a plain loop.

Rows become one sequence [1, T] without padding. The batch marks document boundaries for every attention implementation:
`doc_lens` (ours), restarting `position_ids` (sdpa, eager, flex) and `cu_seq_lens_q` (flash).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from unspool.core.errors import ConfigError, DataError
from unspool.data.packing.row import IGNORE, Row, position_ids
from unspool.models.attention.padding import skip_masks
from unspool.models.checks import check_attention, check_trainable
from unspool.models.rotary import OWN_ATTENTION, decides_by_document, depends_on_length, head_bases
from unspool.training.batch import Batch, build_batch

ATTENTION = ("intra_document", "full")


class Collator:
    """Collate packed rows into a batch for `model(**batch)`, whose loss is the mean over the batch's labels.

    Args:
        model: The model to train. The collator refuses a model that would compute another loss than the rows define.
            Without it, nothing is checked, and the model must use `attn_implementation="unspool"`.
        attention: `intra_document` follows each row; `full` lets the documents of a row attend to each other.

    Example:
        >>> import numpy as np
        >>> import unspool
        >>> collate = unspool.Collator()
        >>> batch = collate([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
        >>> batch["position_ids"].tolist(), batch["labels"].tolist()
        ([[0, 1, 2, 0, 1]], [[-100, 6, 7, -100, 9]])
    """

    def __init__(self, model: Any = None, *, attention: str = "intra_document") -> None:
        if attention not in ATTENTION:
            raise ConfigError(f"Collator: attention {attention!r} is not known; use {' or '.join(ATTENTION)}.")
        self.attention = attention
        # Only the name: worker processes of a DataLoader get a copy of the collator.
        self._implementation = None if model is None else _check_model(model)

    def __call__(self, rows: Sequence[Row | Mapping[str, Any]]) -> dict[str, Any]:
        """Return one batch that holds all rows."""
        found = [row if isinstance(row, Row) else _row_of(row) for row in rows]
        batch = build_batch(found, attention=self.attention)
        self._check_positions(batch)
        return _inputs(batch)

    def step(self, rows: Sequence[Row | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the micro-batches of one optimizer step, one per row, for loops that accumulate gradients themselves.

        Each has `num_items_in_batch`, the number of labels in the whole step. Models of `transformers` divide the sum
        of token losses by it, so the gradients of `model(**batch).loss` add up to that of the mean over the step.
        """
        batches = [self([row]) for row in rows]
        num_items = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in batches)
        return [batch | {"num_items_in_batch": num_items} for batch in batches]

    def _check_positions(self, batch: Batch) -> None:
        """Refuse skipped positions (PoSE) if the attention treats every skip as the start of a document."""
        if self._implementation == OWN_ATTENTION or (self._implementation or "").startswith("flash_attention"):
            return
        if batch.position_ids.tolist() == position_ids(np.array(batch.doc_lens)).tolist():
            return
        if self._implementation is None:
            raise ConfigError(
                "Collator: these rows skip positions (PoSE), which only some attention implementations can distinguish "
                "from document boundaries; use Collator(model), which checks it."
            )
        raise ConfigError(
            f"Collator: these rows skip positions (PoSE), and attention {self._implementation!r} treats every skip "
            f"as a new document; load the model with attn_implementation={OWN_ATTENTION!r}."
        )


def _inputs(batch: Batch) -> dict[str, Any]:
    ends = torch.tensor([*accumulate(batch.doc_lens, initial=0)], dtype=torch.int32)
    longest = max(batch.doc_lens)
    return batch.model_inputs | {
        # Not shifted, for code that shifts `labels` itself; `transformers` does not shift `shift_labels` again.
        "labels": F.pad(batch.shift_labels[:-1], (1, 0), value=IGNORE)[None],
        "shift_labels": batch.shift_labels[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        # With a cache, the default, `transformers` would ignore document boundaries in `position_ids`.
        "use_cache": False,
    }


def _row_of(item: Mapping[str, Any]) -> Row:
    """Build a row from a mapping of `PackedDataset.to_hf()`: input_ids, seq_lengths; optional labels, position_ids."""
    missing = [name for name in ("input_ids", "seq_lengths") if name not in item]
    if missing:
        raise DataError(
            f"Collator: a row has no {missing[0]}, only {', '.join(map(str, item)) or 'nothing'}; give rows of "
            "unspool.pack or its to_hf(), and set remove_unused_columns=False in the trainer's arguments."
        )
    tokens, doc_lens = (np.asarray(item[name], dtype=np.int64) for name in ("input_ids", "seq_lengths"))
    if doc_lens.sum() != len(tokens) or (doc_lens < 1).any():
        raise DataError(
            f"Collator: seq_lengths of a row add up to {doc_lens.sum()}, but it has {len(tokens)} input_ids; "
            "do not truncate or pad packed rows."
        )
    loss_mask = None
    if item.get("labels") is not None:
        labels = np.asarray(item["labels"], dtype=np.int64)
        loss_mask = labels != IGNORE
        if len(labels) != len(tokens) or (labels != tokens)[loss_mask].any():
            raise DataError(
                "Collator: labels of a row differ from its input_ids, as if they were shifted; give labels that are "
                f"equal to input_ids, with {IGNORE} where a token carries no loss."
            )
    given = item.get("position_ids")
    positions = None if given is None else np.asarray(given, dtype=np.int64)
    if positions is not None and np.array_equal(positions, position_ids(doc_lens)):
        positions = None
    return Row(
        tokens=tokens,
        doc_lens=doc_lens,
        loss_mask=loss_mask,
        source="",
        attention="intra_document",
        positions=positions,
    )


def _check_model(model: Any) -> str:
    """Refuse a model that would compute another loss; return the name of its attention."""
    name = str(model.config._attn_implementation)
    if name != OWN_ATTENTION and head_bases(model) is not None:
        raise ConfigError(
            f"Collator: attention {name!r} does not support a base per head (HARPE); load the model with unspool.load."
        )
    if depends_on_length(model) and not decides_by_document(model):
        raise ConfigError(
            "Collator: this model's RoPE frequencies depend on the input length, which would be that of the "
            "longest document of a batch; load the model with unspool.load."
        )
    was_training = model.training
    model.eval()
    try:
        if name == OWN_ATTENTION and head_bases(model) is None:
            check_attention(model, name)
        check_trainable(model)
    finally:
        model.train(was_training)
    if name == OWN_ATTENTION:
        skip_masks(model)
    return name
