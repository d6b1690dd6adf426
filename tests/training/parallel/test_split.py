"""Batches cut among sequence ranks: nothing lost, nothing twice, work shared equally."""

import pytest
import torch

from factory import random_row
from unspool.core.errors import ConfigError
from unspool.data.packing.row import IGNORE
from unspool.training.batch import build_batch, sequence_part, split_batch

DOCS = ((3, 17, 1, 20), (29, 5, 7), (1,), (40, 2))


def build(docs=DOCS, *, mask=0.3, attention="intra_document"):
    return build_batch([random_row(lens, seed, mask=mask) for seed, lens in enumerate(docs)], attention=attention)


@pytest.mark.parametrize("degree", [2, 3, 4, 7])
def test_parts_put_together_are_the_whole(degree):
    batch = build()
    parts = [split_batch(batch, rank, degree) for rank in range(degree)]

    assert {len(part.tokens) for part in parts} == {-(-len(batch.tokens) // degree)}
    for name in ("tokens", "shift_labels", "position_ids"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(together[: len(batch.tokens)], getattr(batch, name)), name
    padding = torch.cat([part.shift_labels for part in parts])[len(batch.tokens) :]
    assert (padding == IGNORE).all()


@pytest.mark.parametrize(("degree", "ring"), [(2, 1), (3, 1), (7, 1), (2, 2), (4, 2), (6, 2), (4, 4)])
def test_every_label_is_in_exactly_one_part(degree, ring):
    batch = build(((83,),) if ring > 1 else DOCS)
    parts = [split_batch(batch, rank, degree, ring=ring) for rank in range(degree)]

    counts = torch.tensor([part.num_valid for part in parts]).sum(0)
    assert counts.tolist() == list(batch.num_valid)
    assert all(sum(part.num_valid) == int((part.shift_labels != IGNORE).sum()) for part in parts)
    assert all(sum(part.row_lens) == len(part.tokens) for part in parts)
    targets = torch.cat([part.shift_labels for part in parts])
    wanted = batch.shift_labels
    assert sorted(targets[targets != IGNORE].tolist()) == sorted(wanted[wanted != IGNORE].tolist())


def test_all_ranks_know_all_documents_and_padding_is_one_of_its_own():
    batch = build()
    parts = [split_batch(batch, rank, 4) for rank in range(4)]

    extra = sum(len(part.tokens) for part in parts) - len(batch.tokens)
    assert extra, "nothing is padded, so the next line would check nothing"
    assert {part.doc_lens for part in parts} == {(*batch.doc_lens, extra)}


def test_a_ring_rank_gets_a_piece_from_the_front_and_one_from_the_back():
    assert sequence_part(12, 0, 3, ring=3).tolist() == [0, 1, 10, 11]
    assert sequence_part(12, 1, 3, ring=3).tolist() == [2, 3, 8, 9]
    assert sequence_part(12, 2, 3, ring=3).tolist() == [4, 5, 6, 7]


def test_ranks_that_exchange_heads_cut_a_rings_pieces_further():
    assert [sequence_part(16, rank, 4, ring=2).tolist() for rank in range(2)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert [sequence_part(16, rank, 4, ring=2).tolist() for rank in (2, 3)] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("ring", [2, 4])
def test_ring_ranks_attend_equally_much(ring):
    seen = [int((sequence_part(64, rank, ring, ring=ring) + 1).sum()) for rank in range(ring)]

    assert len(set(seen)) == 1
    assert len({int((sequence_part(64, rank, ring) + 1).sum()) for rank in range(ring)}) == ring, (
        "so would any other split"
    )


def test_with_a_ring_padding_is_behind_the_only_document():
    part = split_batch(build(((13,),), attention="full"), 0, 2, ring=2)

    assert part.doc_lens == (16,)


def test_a_ring_over_several_documents_is_refused():
    with pytest.raises(ConfigError, match="needs rows of one document, but this batch holds 10"):
        split_batch(build(), 0, 2, ring=2)


def test_one_rank_gets_the_batch_as_it_is():
    batch = build()

    assert split_batch(batch, 0, 1) is batch


@pytest.mark.parametrize(("degree", "ring"), [(2, 1), (3, 1), (7, 1), (2, 2), (4, 2)])
def test_every_token_keeps_the_length_of_its_whole_document(degree, ring):
    docs = ((83,),) if ring > 1 else DOCS
    batch = build(docs)
    wanted = torch.cat([torch.full((length,), length) for lens in docs for length in lens])

    for rank in range(degree):
        part = split_batch(batch, rank, degree, ring=ring)
        found = torch.cat([torch.full((count,), length) for count, length in part.rope_spans])
        own = sequence_part(degree * len(part.tokens), rank, degree, ring=ring)
        real = own < len(wanted)
        assert torch.equal(found[real], wanted[own[real]])
        assert len(found) == len(part.tokens)
