from dataclasses import replace

import numpy as np
import torch

from factory import random_row
from unspool.data.packing.row import IGNORE, labels
from unspool.data.strategies.pose import PoseConfig, skip_positions
from unspool.training.batch import build_batch, row_sums

ROWS = [random_row((5, 3), 1, mask=0.3), random_row((8,), 2), random_row((4, 4), 3, attention="full", mask=0.5)]


def test_rows_become_one_sequence_in_which_positions_restart_with_every_document():
    batch = build_batch(ROWS, attention="intra_document")

    assert batch.tokens.tolist() == [token for row in ROWS for token in row.tokens.tolist()]
    # The last row attends in full, so its two pieces are one document.
    assert batch.doc_lens == (5, 3, 8, 8)
    assert batch.position_ids.tolist() == [*range(5), *range(3), *range(8), *range(8)]
    assert batch.row_lens == (8, 8, 8)


def test_full_attention_makes_a_document_of_every_row():
    batch = build_batch(ROWS, attention="full")

    assert batch.doc_lens == (8, 8, 8)
    assert batch.position_ids.tolist() == [*range(8)] * 3


def test_labels_are_those_of_each_row_alone_whatever_attention():
    """Full attention sees across documents, but still no label crosses from one into the next."""
    alone = np.concatenate([labels(row.tokens, row.doc_lens, row.loss_mask) for row in ROWS])
    for attention in ("intra_document", "full"):
        batch = build_batch(ROWS, attention=attention)

        assert batch.labels.tolist() == alone.tolist()
        assert (batch.labels[[4, 7, 15, 19, 23]] == IGNORE).all()
        by_row = [int((part != IGNORE).sum()) for part in torch.split(batch.labels, 8)]
        assert batch.num_valid == tuple(by_row)
        assert len(set(by_row)) == 3, "equal counts would hide a mix-up"


def test_row_sums_add_up_each_row_and_no_other():
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])

    assert row_sums(losses, (2, 1, 3)).tolist() == [3.0, 4.0, 56.0]


def test_row_sums_keep_a_small_row_beside_a_huge_one():
    losses = torch.tensor([1e8, 1e-3])

    assert abs(float(row_sums(losses, (1, 1))[1]) - 1e-3) < 1e-6


def test_positions_of_rows_arrive_in_the_batch():
    """Rows of 8 tokens with the positions of 64, eight of them to a context of 64."""
    rows = [random_row((5, 3), seed, attention="full") for seed in range(7)]
    positions = skip_positions(np.full(7, 8), PoseConfig(target=64), np.random.default_rng(0)).reshape(7, 8)
    skipped = [replace(row, positions=each) for row, each in zip(rows, positions, strict=True)]
    plain = random_row((5, 3), 7)
    batch = build_batch([*skipped, plain], attention="intra_document")

    assert batch.doc_lens == (8,) * 7 + (5, 3)
    expected = np.concatenate([row.positions for row in skipped])
    assert batch.position_ids.tolist() == [*expected.tolist(), *range(5), *range(3)]
    assert batch.position_ids.dtype == torch.int64
    assert 40 < int(batch.position_ids.max()) < 64
    assert (torch.diff(batch.position_ids[:56].reshape(7, 8), dim=1) > 0).all()
