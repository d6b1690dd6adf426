"""LongCE's weights and step against stock `transformers`, one label after another."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from factory import RowList, build_model, build_stage, random_row
from training.test_step import Recorder, assert_same_grads
from unspool.data.packing.row import labels
from unspool.training.batch import Batch, build_batch
from unspool.training.loader import build_step
from unspool.training.losses import longce as longce_module
from unspool.training.losses.longce import LongCELoss, LongCEWeights, windows
from unspool.training.step import train_step

SHORT, STRIDE, MOST = 6, 4, 1.5
LOSS = {"weights": "longce", "short_context": SHORT, "stride": STRIDE, "max_weight": MOST}
ROWS: dict[str, Any] = {
    "long": RowList(
        [
            random_row((32,), 0),
            random_row((21, 11), 1, mask=0.4),
            random_row((4,) * 8, 2),  # too short for windows
            random_row((5, 27), 3, attention="full"),
            random_row((10, 22), 4),
        ]
    )
}
PICKS = [[("long", index)] for index in (0, 1, 2, 3, 4, 1, 0, 3)]
WEIGHTS = LongCEWeights(short=SHORT, stride=STRIDE, max_weight=MOST)


def plain_weights(model: Any, row: Any) -> torch.Tensor:
    """Each label's weight from two passes of its own; 0 without a label."""
    wanted = labels(row.tokens, row.doc_lens, row.loss_mask)
    spans = row.doc_lens if row.attention == "intra_document" else row.doc_lens.sum(keepdims=True)
    found, begin = torch.zeros(len(row.tokens)), 0

    def loss(start: int, at: int) -> torch.Tensor:
        ids = torch.from_numpy(row.tokens[start : at + 1].astype("int64"))[None]
        return functional.cross_entropy(model(input_ids=ids).logits[0, -1], torch.tensor(wanted[at]))

    with torch.no_grad():
        for span in spans.tolist():
            for at in range(begin, begin + span):
                if wanted[at] == -100:
                    continue
                context = at - begin + 1
                # The last short context of at least SHORT tokens that begins at a multiple of the stride.
                start = begin + max(0, (context - SHORT) // STRIDE * STRIDE)
                found[at] = torch.exp(loss(start, at) - loss(begin, at)).clamp(max=MOST)
            begin += span
    return found


def batch_of(*rows: Any) -> Batch:
    return build_batch(rows, attention="intra_document", weigh=WEIGHTS.of_row)


def test_weights_are_those_of_stock_transformers_label_by_label():
    ours, plain = build_model(), build_model(attention="eager")
    wanted = torch.cat([plain_weights(plain, row) for row in ROWS["long"]])

    # Rows alone and joined: windows of several rows share passes.
    alone = torch.cat([WEIGHTS.of_step(ours, (batch_of(row),), None)[0].weights for row in ROWS["long"]])
    (together,) = WEIGHTS.of_step(ours, (batch_of(*ROWS["long"]),), None)

    torch.testing.assert_close(alone, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together.weights, wanted, rtol=1e-5, atol=1e-6)
    assert float(wanted.max()) == MOST, "the limit was not tried"
    assert len(set(wanted.tolist())) > 20, "weights do not differ, so nothing was tried"
    assert (alone[64:96] == (batch_of(ROWS["long"][2]).shift_labels != -100)).all(), "short documents weigh 1"


def step_of(picks=PICKS, **changes: Any):
    stage = build_stage(**{"loss": LOSS, "batch_tokens": 256, "tokens": 256} | changes)
    model = build_model().train()
    recorder = Recorder(model)
    work = build_step(stage, ROWS, picks, loss_weights=stage.loss.build(stage, None))
    result = train_step(model, recorder, work, lr=stage.lr)
    assert all(part.training for part in model.modules()), "the model was left in another mode"
    return result, recorder.grads


def reference() -> tuple[float, dict[str, torch.Tensor]]:
    model = build_model(attention="eager")
    total, weight = torch.zeros(()), 0.0
    for ((_, index),) in PICKS:
        row, start = ROWS["long"][index], 0
        given, wanted = plain_weights(model, row), torch.from_numpy(labels(row.tokens, row.doc_lens, row.loss_mask))
        for span in row.doc_lens.tolist() if row.attention == "intra_document" else [len(row.tokens)]:
            ids = torch.from_numpy(row.tokens[start : start + span].astype("int64"))[None]
            part = slice(start, start + span)
            losses = functional.cross_entropy(model(input_ids=ids).logits[0], wanted[part], reduction="none")
            total = total + (given[part] * losses).sum()
            start += span
        weight += float(given.double().sum())
    (total / weight).backward()
    return float(total.detach()) / weight, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_batch", [32, 64, 256])
def test_loss_and_gradient_are_the_weighted_mean_of_stock_transformers(micro_batch):
    loss, grads = reference()

    result, found = step_of(micro_batch_tokens=micro_batch)

    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert_same_grads(found, grads)


def forget_documents(monkeypatch) -> None:
    """Windows begin in the document before."""
    true_passes = LongCEWeights.short_passes
    monkeypatch.setattr(
        LongCEWeights,
        "short_passes",
        lambda self, batch: true_passes(self, replace(batch, doc_lens=(len(batch.tokens),))),
    )


def shift_windows(monkeypatch) -> None:
    """Every window gives the label before."""
    true_pass = longce_module._pass_of

    def shifted(*args: Any) -> Any:
        found = true_pass(*args)
        return replace(found, labels=(found.labels - 1).clamp(min=0))

    monkeypatch.setattr(longce_module, "_pass_of", shifted)


def forget_limit(monkeypatch) -> None:
    true_step = LongCEWeights.of_step
    monkeypatch.setattr(LongCEWeights, "of_step", lambda self, *args: true_step(replace(self, max_weight=99.0), *args))


@pytest.mark.parametrize("mistake", [forget_documents, shift_windows, forget_limit])
def test_mistakes_show(mistake, monkeypatch):
    _, grads = reference()
    mistake(monkeypatch)

    _, found = step_of()

    assert max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in grads.items()) > 5e-3


@pytest.mark.parametrize(("short", "stride"), [(6, 4), (5, 1), (4, 8), (1, 3)])
@pytest.mark.parametrize("length", [3, 9, 10, 11, 32, 64])
def test_every_label_with_enough_context_is_in_one_window(short, stride, length):
    contexts: dict[int, int] = {}
    for start, stop in windows(length, short, stride):
        for at in range(start + short - 1, stop - 1):
            assert at not in contexts
            contexts[at] = at - start + 1

    assert set(contexts) == set(range(short + stride - 1, length - 1))
    assert all(short <= context < short + stride for context in contexts.values())


def test_the_cost_counts_the_tokens_of_all_passes():
    config = LongCELoss(**LOSS)
    for row in ROWS["long"]:
        batch = batch_of(row)
        found = WEIGHTS.short_passes(batch)
        lens = [size for one in found for size in one.batch.doc_lens]
        long = [span for span in batch.doc_lens if span > SHORT + STRIDE]
        wanted = (sum(lens) + sum(long), sum(np.square(lens)) + sum(np.square(long)))
        costs = [config.forward_only(span, 32) for span in batch.doc_lens]
        assert tuple(map(sum, zip(*costs, strict=True))) == wanted
        assert all(len(one.batch.tokens) <= len(batch.tokens) for one in found)
