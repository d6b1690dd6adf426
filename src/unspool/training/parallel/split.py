"""A batch cut into the parts that sequence ranks compute.

In: a whole `Batch`, whose labels are already shifted, and a rank's place. Out: the rank's `Batch`: its own tokens,
labels and positions, and the documents of the whole, since attention works on whole rows.
Promise: every label is in exactly one part, whatever the lengths of documents; what is padded carries no loss and is
seen by nothing.
Parts are equally long. With a ring the row is cut into twice as many pieces as it has ranks, and a rank gets one from
the front and one from the back (the first and the last, the second and the last but one …), so that all have as much
to attend to; each such pair is then cut among the ranks that exchange heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE
from unspool.training.batch import Batch


def split_batch(batch: Batch, rank: int, degree: int, *, ring: int = 1) -> Batch:
    """The part of sequence rank `rank` of `degree`, of which `ring` pass keys on and the rest exchange heads.

    Rows of which this part has nothing have a length of 0; padding counts as the last row's.
    """
    if degree == 1:
        return batch
    if ring > 1 and len(batch.doc_lens) > 1:
        raise ConfigError(
            f"parallel: ring={ring} needs rows of one document, and this batch holds {len(batch.doc_lens)}; use ring 1 "
            "and ulysses, or attention: full with one row per micro-batch."
        )
    padded = pad_batch(batch, degree * (2 if ring > 1 else 1), own_document=ring == 1)
    mine = part_of(len(padded.tokens), rank, degree, ring=ring)
    num_rows = len(batch.row_lens)
    row_of = torch.repeat_interleave(torch.arange(num_rows), torch.tensor(padded.row_lens))[mine]
    labels = padded.labels[mine]
    return Batch(
        tokens=padded.tokens[mine],
        labels=labels,
        position_ids=padded.position_ids[mine],
        doc_lens=padded.doc_lens,
        row_lens=tuple(torch.bincount(row_of, minlength=num_rows).tolist()),
        num_valid=tuple(torch.bincount(row_of[labels != IGNORE], minlength=num_rows).tolist()),
    )


def pad_batch(batch: Batch, unit: int, *, own_document: bool) -> Batch:
    """`batch` with tokens without loss at the end, up to a multiple of `unit`.

    As a document of their own they cost next to nothing; as part of the last one they are behind all that matters.
    """
    extra = -len(batch.tokens) % unit
    if not extra:
        return batch
    *before, last = batch.doc_lens
    return Batch(
        tokens=F.pad(batch.tokens, (0, extra)),
        labels=F.pad(batch.labels, (0, extra), value=IGNORE),
        position_ids=torch.cat([batch.position_ids, torch.arange(extra)]),
        doc_lens=(*before, last, extra) if own_document else (*before, last + extra),
        row_lens=(*batch.row_lens[:-1], batch.row_lens[-1] + extra),
        num_valid=batch.num_valid,
    )


def part_of(length: int, rank: int, degree: int, *, ring: int = 1) -> Tensor:
    """int64[length / degree]: the places of a row that `rank` computes, in their order."""
    places = torch.arange(length)
    if ring > 1:
        ring_rank, rank = divmod(rank, degree // ring)
        pieces = places.view(2 * ring, -1)
        places = torch.cat([pieces[ring_rank], pieces[2 * ring - 1 - ring_rank]])
    return places.view(degree // ring, -1)[rank]
