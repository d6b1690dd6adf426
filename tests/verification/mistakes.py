"""Bugs made on purpose, in the code that training really runs."""

import numpy as np

import unspool.training.batch
import unspool.training.step
from unspool.data.packing.row import IGNORE
from unspool.training.batch import Batch


def cross_documents(monkeypatch) -> None:
    """Let the last token of a document predict the first of the next one."""

    def crossing(tokens, doc_lens, loss_mask):
        shifted = np.append(tokens[1:].astype(np.int64), IGNORE)
        if loss_mask is not None:
            shifted[:-1][~loss_mask[1:]] = IGNORE
        return shifted

    monkeypatch.setattr(unspool.training.batch, "labels", crossing)


def set_attention_lens(monkeypatch, change) -> None:
    """Give attention other document lengths than a batch has."""

    def inputs(batch: Batch):
        return {
            "input_ids": batch.tokens[None],
            "position_ids": batch.position_ids[None],
            "doc_lens": change(batch.doc_lens),
        }

    monkeypatch.setattr(Batch, "model_inputs", property(inputs))


def leak_attention(monkeypatch) -> None:
    """Let attention see the whole row."""
    set_attention_lens(monkeypatch, lambda doc_lens: (sum(doc_lens),))


def average_micro_batches(monkeypatch) -> None:
    """Average the loss within every micro-batch."""
    weigh_loss(monkeypatch, lambda labels, _: 10 / max(1, int((labels != IGNORE).sum())), losses_too=True)


def weigh_loss(monkeypatch, weight, *, losses_too: bool = False) -> None:
    """Multiply the loss of a micro-batch by a weight of its labels and its number, from 1."""
    summed, calls = unspool.training.step.summed_loss, []

    def weighed(hidden, head, labels, **options):
        calls.append(0)
        total, losses = summed(hidden, head, labels, **options)
        factor = weight(labels, len(calls))
        return total * factor, losses * factor if losses_too else losses

    monkeypatch.setattr(unspool.training.step, "summed_loss", weighed)
