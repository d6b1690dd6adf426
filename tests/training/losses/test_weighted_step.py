"""A step with weighted labels against stock `transformers`, one document after another: Σ w·ℓ / Σ w of the step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from factory import RowList, build_model, build_stage, random_row
from training.test_step import Recorder, assert_same_grads
from unspool.data.packing.row import labels
from unspool.training import step as step_module
from unspool.training.batch import Batch
from unspool.training.loader import build_step
from unspool.training.step import train_step

# Documents of several lengths, so that rows differ in the sum of their weights.
LONG = [random_row(lens, seed, mask=0.5 if seed % 2 else None) for seed, lens in enumerate([(32,), (20, 12), (4,) * 8])]
SHORT = [random_row((16,), seed, mask=0.2) for seed in range(10, 14)]
TANGLED = [random_row((5, 27), 20, attention="full")]
ROWS: dict[str, Any] = {"long": RowList(LONG), "short": RowList(SHORT), "tangled": RowList(TANGLED)}
PICKS = [
    [("long", 0)],
    [("short", 0), ("short", 1)],
    [("long", 1)],
    [("tangled", 0)],
    [("long", 2)],
    [("short", 2), ("short", 3)],
    [("long", 1)],
    [("long", 0)],
]
EXACT = {"weights": "exact", "threshold": 6, "extra": 0.6}


def stage_of(**changes: Any):
    plain = {"loss": EXACT, "mix": {"long": 2, "short": 1, "tangled": 1}, "batch_tokens": 256, "tokens": 256}
    return build_stage(**plain | changes)


def step_of(picks=PICKS, model: Any = None, **changes: Any):
    stage = stage_of(**changes)
    model = model or build_model()
    weights = stage.loss.build(stage, stage.loss.measure(stage, ROWS))
    recorder = Recorder(model)
    result = train_step(model, recorder, build_step(stage, ROWS, picks, loss_weights=weights), lr=stage.lr)
    return result, recorder.grads


def reference() -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Every part that attends to itself alone, full logits, one weighted mean over all labels of the step."""
    stage, model = stage_of(), build_model(attention="eager")
    of_row = stage.loss.build(stage, stage.loss.measure(stage, ROWS)).of_row
    sums = {name: torch.zeros(()) for name in ROWS}
    weights = dict.fromkeys(ROWS, 0.0)
    for slot in PICKS:
        for name, index in slot:
            row, start = ROWS[name][index], 0
            spans = row.doc_lens if row.attention == "intra_document" else row.doc_lens.sum(keepdims=True)
            wanted = torch.from_numpy(labels(row.tokens, row.doc_lens, row.loss_mask))
            given = torch.from_numpy(of_row(row, spans)).masked_fill(wanted == -100, 0.0)
            for span in spans.tolist():
                ids = torch.from_numpy(row.tokens[start : start + span].astype("int64"))[None]
                part = slice(start, start + span)
                losses = functional.cross_entropy(model(input_ids=ids).logits[0], wanted[part], reduction="none")
                sums[name] = sums[name] + (given[part] * losses).sum()
                weights[name] += float(given[part].double().sum())
                start += span
    loss = sum(sums.values()) / sum(weights.values())
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), grads, {name: sums[name].item() / weights[name] for name in ROWS}


@pytest.mark.parametrize("micro_batch", [32, 64, 256])
def test_loss_and_gradient_are_the_weighted_mean_of_stock_transformers(micro_batch):
    loss, grads, by_rows = reference()

    result, found = step_of(micro_batch_tokens=micro_batch)

    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.losses == pytest.approx(by_rows, rel=1e-6)
    assert_same_grads(found, grads)


def test_the_order_of_rows_changes_neither_loss_nor_gradient():
    first, wanted = step_of()

    second, found = step_of([PICKS[at] for at in (6, 2, 7, 0, 5, 1, 4, 3)], micro_batch_tokens=128)

    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert_same_grads(found, wanted)


def test_uniform_weights_change_no_bit():
    """The default computes what it computed before there were weights, and weights of 1 give the same numbers."""
    plain, wanted = step_of(loss={"weights": "uniform"})
    stage = stage_of(loss={"weights": "uniform"})
    assert stage.loss.build(stage, stage.loss.measure(stage, ROWS)) is None
    work = build_step(stage, ROWS, PICKS)
    assert all(batch.weights is None for batch in work.batches)
    ones = replace(work, batches=tuple(_with_ones(batch) for batch in work.batches))
    recorder = Recorder(build_model())
    result = train_step(recorder._model, recorder, ones, lr=1.0)

    assert result.loss == plain.loss
    assert all(torch.equal(grad, wanted[name]) for name, grad in recorder.grads.items())


def _with_ones(batch: Batch) -> Batch:
    return replace(batch, weights=(batch.shift_labels != -100).float())


# Mistakes that must show


def divide_by_labels(monkeypatch) -> None:
    """Divide by the number of labels instead of the sum of their weights."""
    monkeypatch.setattr(Batch, "row_weights", property(lambda batch: list(batch.num_valid)))


def divide_by_micro_batch(monkeypatch) -> None:
    """Average within every micro-batch."""
    true_loss = step_module.batch_loss

    def averaged(model: Any, batch: Batch) -> Any:
        total, losses = true_loss(model, batch)
        return 10 * total / batch.weights.sum(), losses

    monkeypatch.setattr(step_module, "batch_loss", averaged)


def forget_weights(monkeypatch) -> None:
    """Weigh the losses that are reported, but not the gradient."""
    true_loss = step_module.summed_loss
    monkeypatch.setattr(step_module, "summed_loss", lambda *args, weights, **more: true_loss(*args, **more))


@pytest.mark.parametrize("mistake", [divide_by_labels, divide_by_micro_batch, forget_weights])
def test_mistakes_show(mistake, monkeypatch):
    loss, grads, _ = reference()
    mistake(monkeypatch)

    result, found = step_of()

    largest = max(float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in grads.items())
    assert largest > 5e-3
    if mistake is divide_by_labels:
        assert abs(result.loss / loss - 1) > 1e-3
