"""Where the documents of somebody else's batch are, and which of its labels carry loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE

Span = tuple[int, int]  # first token, and the one after the last
Batch = Mapping[str, Any]
# Returns the lengths of the documents of every row.
Documents = Callable[[Batch], Sequence[Sequence[int]]]
# Names under which trainers pass the documents of a flat batch, as lengths and as ends.
_LENGTHS = ("doc_lens", "seq_lengths", "seq_lens")
_ENDS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
# Names of a number per token that differs from document to document.
_IDS = ("seq_idx", "document_ids", "doc_ids", "segment_ids")


@dataclass(frozen=True, kw_only=True)
class Special:
    """Tokens that end documents and that fill rows."""

    eos: frozenset[int]
    pad: int | None


@dataclass(frozen=True, kw_only=True)
class Spans:
    rows: list[list[Span]]  # documents of every row of the batch, padding left out
    source: str  # how they were found

    @property
    def count(self) -> int:
        return sum(map(len, self.rows))


def special_tokens(model: Any) -> Special:
    config = model.config.get_text_config()
    found = getattr(config, "eos_token_id", None)
    eos = found if isinstance(found, list | tuple) else [found]
    return Special(
        eos=frozenset(int(token) for token in eos if token is not None), pad=getattr(config, "pad_token_id", None)
    )


def token_ids(batch: Batch) -> Tensor:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise ConfigError(
            "audit: a batch must be a dict with input_ids of shape [rows, tokens]; give a DataLoader of such batches."
        )
    return ids


def find_spans(batch: Batch, special: Special, *, documents: Documents | None, packed: bool) -> Spans:
    """The documents of a batch; if not `packed`, end-of-text tokens inside of a row end no document."""
    ids = token_ids(batch)
    ends = _real_lengths(batch, special)
    if documents is not None:
        by_row = zip(documents(batch), ends, strict=True)
        return Spans(rows=[_cut(_from_lens(of_row), end) for of_row, end in by_row], source="documents=")
    if len(ids) == 1:
        for name in _LENGTHS:
            if batch.get(name) is not None:
                lens = [int(length) for length in torch.as_tensor(batch[name]).flatten()]
                if sum(lens) == ids.shape[1]:
                    return Spans(rows=[_cut(_from_lens(lens), ends[0])], source=name)
        for name in _ENDS:
            if isinstance(batch.get(name), Tensor):
                bounds = batch[name].flatten().tolist()
                return Spans(rows=[_cut(list(pairwise(bounds)), ends[0])], source=name)
    for name in _IDS:
        if isinstance(batch.get(name), Tensor) and batch[name].shape == ids.shape:
            return Spans(rows=_where(torch.diff(batch[name]) != 0, ends), source=name)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype != torch.bool and int(mask.max()) > 1:
        return Spans(rows=_where(torch.diff(mask) != 0, ends), source="attention_mask")
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        rows = _where(torch.diff(positions) <= 0, ends)
        if any(len(row) > 1 for row in rows):
            return Spans(rows=rows, source="position_ids")
    if packed and special.eos:
        is_end = torch.isin(ids[:, :-1], torch.tensor(sorted(special.eos), device=ids.device))
        rows = _where(is_end, ends)
        if any(len(row) > 1 for row in rows):
            return Spans(rows=rows, source="end-of-text tokens")
    return Spans(rows=[[(0, end)] if end else [] for end in ends], source="rows")


def _from_lens(lens: Sequence[int]) -> list[Span]:
    return list(pairwise(accumulate(map(int, lens), initial=0)))


def _where(starts: Tensor, ends: Sequence[int]) -> list[list[Span]]:
    """Spans of rows in which a document starts after each marked token."""
    rows = []
    for marks, end in zip(starts, ends, strict=True):
        bounds = [0, *(at for at in (marks.nonzero()[:, 0] + 1).tolist() if at < end), end]
        rows.append([span for span in pairwise(bounds) if span[1] > span[0]])
    return rows


def _cut(spans: Sequence[Span], end: int) -> list[Span]:
    return [(start, min(stop, end)) for start, stop in spans if start < end and stop > start]


def _real_lengths(batch: Batch, special: Special) -> list[int]:
    """Tokens of each row before its padding, which is at the end."""
    ids, mask = token_ids(batch), batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape and not bool((mask != 0).all()):
        is_real, fewest = mask != 0, 1
    elif special.pad is not None:
        # Without a mask, a single token at the end may be text, or the end-of-text token.
        is_real, fewest = ids != special.pad, 2
    else:
        return [ids.shape[1]] * len(ids)
    length = ids.shape[1]
    ends = (is_real * torch.arange(1, length + 1, device=ids.device)).amax(dim=1).tolist()
    if special.pad in special.eos and fewest == 2:
        ends = [end + 1 for end in ends]  # the first of them ends the last document
    return [int(end) if length - end >= fewest else length for end in ends]


def labels_of(batch: Batch) -> Tensor | None:
    """bool[rows, tokens]: where the token after this one is to carry loss; None if the batch does not say."""
    shifted, plain = batch.get("shift_labels"), batch.get("labels")
    if isinstance(shifted, Tensor):
        return shifted != IGNORE
    if not isinstance(plain, Tensor):
        return None
    found = torch.zeros_like(plain, dtype=torch.bool)
    found[:, :-1] = plain[:, 1:] != IGNORE
    return found
