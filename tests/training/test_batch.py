import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

from factory import CPU, build_model, random_row
from unspool.data.packing.row import IGNORE, Row, labels
from unspool.data.strategies.pose import PoSE, skip_positions
from unspool.models.attention.interface import NAME
from unspool.training.batch import build_batch, row_sums
from unspool.training.collator import Collator
from unspool.training.step import loss_pass

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

        assert batch.shift_labels.tolist() == alone.tolist()
        assert (batch.shift_labels[[4, 7, 15, 19, 23]] == IGNORE).all()
        by_row = [int((part != IGNORE).sum()) for part in torch.split(batch.shift_labels, 8)]
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
    positions = skip_positions(np.full(7, 8), PoSE(target=64), np.random.default_rng(0)).reshape(7, 8)
    skipped = [replace(row, positions=each) for row, each in zip(rows, positions, strict=True)]
    plain = random_row((5, 3), 7)
    batch = build_batch([*skipped, plain], attention="intra_document")

    assert batch.doc_lens == (8,) * 7 + (5, 3)
    expected = np.concatenate([row.positions for row in skipped])
    assert batch.position_ids.tolist() == [*expected.tolist(), *range(5), *range(3)]
    assert batch.position_ids.dtype == torch.int64
    assert 40 < int(batch.position_ids.max()) < 64
    assert (torch.diff(batch.position_ids[:56].reshape(7, 8), dim=1) > 0).all()


# Stock code


@pytest.mark.parametrize("attention", [NAME, "eager", "sdpa"])
@pytest.mark.parametrize("kind", ["packed", "sft"])
def test_the_trainer_of_transformers_computes_our_loss_of_packed_and_sft_rows(attention, kind, tmp_path):
    """The reference is plain cross-entropy, document by document."""
    mask = 0.6 if kind == "sft" else None
    rows = [random_row((5, 3), 1, mask=mask), random_row((2, 6), 2, mask=mask)]
    batch = build_batch(rows, attention="intra_document")
    model = build_model(attention=attention)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], remove_unused_columns=False),
        data_collator=Collator(model),
    )
    inputs = trainer.data_collator(rows)

    _, num_items = trainer.get_batch_samples(iter([inputs]), 1, CPU)
    with torch.no_grad():
        found = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
        # Code that knows `labels` alone shifts them itself.
        unaware = {name: value for name, value in inputs.items() if name != "shift_labels"}
        same = trainer.compute_loss(model, unaware, num_items_in_batch=num_items)
        ours = loss_pass(build_model(), batch)[0] / sum(batch.num_valid)

    wanted = [loss for row in rows for loss in losses_by_document(row)]
    assert int(num_items) == len(wanted)
    assert float(found) == pytest.approx(np.mean(wanted), rel=1e-5)
    assert float(same) == pytest.approx(np.mean(wanted), rel=1e-5)
    assert float(ours) == pytest.approx(np.mean(wanted), rel=1e-5)


def losses_by_document(row: Row) -> list[float]:
    """Losses of the tokens of a row that count, each document alone through plain `transformers`."""
    plain, found = build_model(attention="eager"), []
    counts = np.ones(len(row.tokens), bool) if row.loss_mask is None else row.loss_mask
    for start, end in itertools.pairwise([0, *np.cumsum(row.doc_lens)]):
        ids = torch.from_numpy(row.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            losses = F.cross_entropy(plain(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        found += losses[torch.from_numpy(counts[start + 1 : end])].tolist()
    return found


def test_fields_of_a_batch_given_to_a_stock_model_are_not_shifted_twice():
    """As `labels`, they would be trained to predict the token after the next one."""
    rows = [random_row((5, 3), 1), random_row((2, 6), 2)]
    batch = build_batch(rows, attention="intra_document")
    fields = {name: value[None] for name, value in vars(batch).items() if name.endswith("labels")}
    with torch.no_grad():
        found = build_model(attention="eager")(**batch.model_inputs, **fields).loss

    wanted = np.mean([loss for row in rows for loss in losses_by_document(row)])
    assert fields
    assert found is None or float(found) == pytest.approx(wanted, rel=1e-5)


def test_labels_for_stock_code_are_not_shifted_and_shift_labels_are():
    batch = build_batch(ROWS, attention="intra_document")
    inputs = Collator()(ROWS)

    assert not hasattr(batch, "labels")
    assert "labels" not in batch.model_inputs
    assert inputs["shift_labels"][0].tolist() == batch.shift_labels.tolist()
    assert inputs["labels"][0, 1:].tolist() == batch.shift_labels[:-1].tolist()
