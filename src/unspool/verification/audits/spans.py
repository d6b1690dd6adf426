"""Find the documents in a user's batch, and the labels that contribute to the loss."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE

Span = tuple[int, int]  # first token, last token + 1
Batch = Mapping[str, Any]
# Returns the document lengths of every row.
Documents = Callable[[Batch], Sequence[Sequence[int]]]
# Names that trainers use for document lengths and document ends of a flat batch.
_LENGTHS = ("doc_lens", "seq_lengths", "seq_lens")
_ENDS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
# Names of per-token document numbers.
_IDS = ("seq_idx", "document_ids", "doc_ids", "segment_ids")


END_OF_TEXT = "end-of-text tokens"


@dataclass(frozen=True, kw_only=True)
class Special:
    """End-of-text tokens and padding tokens."""

    eos: frozenset[int]
    pad: int | None


@dataclass(frozen=True, kw_only=True)
class Spans:
    rows: list[list[Span]]  # documents of every row of the batch, without padding
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
    """The documents of a batch. End-of-text tokens inside a row end a document only if `packed`."""
    ids, ranges = token_ids(batch), real_ranges(batch, special)
    if documents is not None:
        by_row = zip(documents(batch), ranges, strict=True)
        return Spans(rows=[_cut(_from_lens(lens), own) for lens, own in by_row], source="documents=")
    if len(ids) == 1:
        for name in _LENGTHS:
            if batch.get(name) is not None:
                found = [int(length) for length in torch.as_tensor(batch[name]).flatten()]
                if sum(found) == ids.shape[1]:
                    return Spans(rows=[_cut(_from_lens(found), ranges[0])], source=name)
        for name in _ENDS:
            if isinstance(batch.get(name), Tensor):
                return Spans(rows=[_cut(list(pairwise(batch[name].flatten().tolist())), ranges[0])], source=name)
    for source, marks in _boundaries(batch, ids, special if packed else None):
        rows = _where(marks, ranges)
        if any(len(row) > 1 for row in rows):
            return Spans(rows=rows, source=source)
    return Spans(rows=[[own] if own[1] > own[0] else [] for own in ranges], source="rows")


def name_sources(spans: Sequence[Spans]) -> str:
    """Say how the documents of all micro-batches were found."""
    names = [each.source for each in spans]
    found = [name for name in dict.fromkeys(names) if name != END_OF_TEXT]
    if count := names.count(END_OF_TEXT):
        found.append(f"{END_OF_TEXT} inside rows, which split rows of {count} of {len(names)} micro-batches")
    return " and ".join(found)


def _boundaries(batch: Batch, ids: Tensor, special: Special | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (source, bool[rows, tokens - 1]): True where the next token starts a new document."""
    for name in _IDS:
        if isinstance(batch.get(name), Tensor) and batch[name].shape == ids.shape:
            yield name, torch.diff(batch[name]) != 0
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype != torch.bool and int(mask.max()) > 1:
        yield "attention_mask", torch.diff(mask) != 0
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] == mask.shape[-2] == ids.shape[1]:
        before = mask[:, 0].diagonal(offset=-1, dim1=-2, dim2=-1)
        # An additive mask: 0 marks visible tokens.
        yield "attention_mask", (~before if mask.dtype == torch.bool else before < 0).expand(len(ids), -1)
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        yield "position_ids", torch.diff(positions) <= 0
    if special is not None and special.eos:
        ends = torch.tensor(sorted(special.eos), device=ids.device)
        yield END_OF_TEXT, torch.isin(ids[:, :-1], ends)


def look_packed(batches: Sequence[Batch], special: Special) -> bool:
    """True if most rows are full and equally long. Then end-of-text tokens inside a row end documents.

    In rows of one conversation each, which differ in length, they end turns.
    """
    lengths = []
    for batch in batches:
        total = token_ids(batch).shape[1]
        lengths += [total if own == (0, total) else -1 for own in real_ranges(batch, special)]
    return len(lengths) > 1 and Counter(lengths).most_common(1)[0][1] > len(lengths) / 2 and -1 not in lengths


def _from_lens(lens: Sequence[int]) -> list[Span]:
    return list(pairwise(accumulate(map(int, lens), initial=0)))


def _where(starts: Tensor, ranges: Sequence[Span]) -> list[list[Span]]:
    """Spans of rows, where a document starts after each marked token."""
    rows = []
    for marks, (begin, end) in zip(starts, ranges, strict=True):
        bounds = [begin, *(at for at in (marks.nonzero()[:, 0] + 1).tolist() if begin < at < end), end]
        rows.append([span for span in pairwise(bounds) if span[1] > span[0]])
    return rows


def _cut(spans: Sequence[Span], own: Span) -> list[Span]:
    cut = [(max(start, own[0]), min(stop, own[1])) for start, stop in spans]
    return [span for span in cut if span[1] > span[0]]


def real_ranges(batch: Batch, special: Special) -> list[Span]:
    """Tokens of each row without its padding (at the start or end)."""
    ids, mask = token_ids(batch), batch.get("attention_mask")
    length = ids.shape[1]
    numbers = torch.arange(length, device=ids.device)
    if isinstance(mask, Tensor) and mask.shape == ids.shape and not bool((mask != 0).all()):
        is_real = mask != 0
        begins = numbers.where(is_real, length).amin(dim=1).tolist()
        ends = (numbers + 1).where(is_real, 0).amax(dim=1).tolist()
        return [(min(begin, end), end) for begin, end in zip(begins, ends, strict=True)]
    if special.pad is None:
        return [(0, length)] * len(ids)
    ends = (numbers + 1).where(ids != special.pad, 0).amax(dim=1).tolist()
    if special.pad in special.eos:
        ends = [end + 1 for end in ends]  # the first padding token ends the last document
    # Without a mask, a single padding token at the end may be text.
    return [(0, end if length - end > 1 else length) for end in ends]


def labels_of(batch: Batch) -> Tensor | None:
    """bool[rows, tokens]: True if the next token has a label; None if the batch has no labels."""
    shifted, plain = batch.get("shift_labels"), batch.get("labels")
    if isinstance(shifted, Tensor):
        return shifted != IGNORE
    if not isinstance(plain, Tensor):
        return None
    found = torch.zeros_like(plain, dtype=torch.bool)
    found[:, :-1] = plain[:, 1:] != IGNORE
    return found
