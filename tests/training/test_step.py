"""One step against stock `transformers` with plain cross-entropy, and the same whatever its split."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from factory import build_model, build_stage, random_row
from unspool.data.packing.row import labels
from unspool.training.loader import build_step
from unspool.training.optim.updater import build_updater
from unspool.training.step import train_step

# Rows differ much in how many labels count, so that a mean of means would be another number.
LONG = [random_row((20, 12), seed, mask=0.9 if seed % 2 else 0.0) for seed in range(5)]
SHORT = [random_row((16,), seed, mask=0.2) for seed in range(10, 16)]
ROWS: dict[str, Any] = {"long": LONG, "short": SHORT}
# Eight slots of 32 tokens; a slot of short rows holds two of them.
PICKS = [
    *([("long", index)] for index in range(5)),
    *([("short", index), ("short", index + 1)] for index in (0, 2, 4)),
]


class Recorder:
    """In the updater's place: keeps the gradient."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.grads: dict[str, torch.Tensor] = {}

    def begin(self, lr: float) -> None:
        self._model.zero_grad(set_to_none=True)

    def finish(self, *, is_good: bool, max_norm: float) -> float:
        self.grads = {name: parameter.grad.clone() for name, parameter in self._model.named_parameters()}
        return float(torch.nn.utils.get_total_norm(self.grads.values()))


def run_step(stage, model: Any, updater: Any, picks=PICKS, rows=ROWS):
    return train_step(model, updater, build_step(stage, rows, picks), lr=stage.lr)


def step_of(model: Any, picks=PICKS, **changes):
    recorder = Recorder(model)
    stage = build_stage(batch_tokens=256, tokens=256, **changes)
    return run_step(stage, model, recorder, picks), recorder.grads


def reference(model: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Every document alone, full logits, one mean over all valid tokens of the step."""
    sums = {name: torch.zeros(()) for name in ROWS}
    counts = dict.fromkeys(ROWS, 0)
    for slot in PICKS:
        for name, index in slot:
            row, start = ROWS[name][index], 0
            wanted = torch.from_numpy(labels(row.tokens, row.doc_lens, row.loss_mask))
            for doc_len in row.doc_lens.tolist():
                ids = torch.from_numpy(row.tokens[start : start + doc_len].astype("int64"))[None]
                part = wanted[start : start + doc_len]
                sums[name] = sums[name] + functional.cross_entropy(
                    model(input_ids=ids).logits[0], part, reduction="sum"
                )
                counts[name] += int((part != -100).sum())
                start += doc_len
    loss = sum(sums.values()) / sum(counts.values())
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), grads, {name: sums[name].item() / counts[name] for name in ROWS}


def assert_same_grads(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To 1e-4 of each value, and to 1e-5 of the largest where sums cancel."""
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_loss_and_gradient_are_those_of_stock_transformers_document_by_document(family):
    loss, grads, by_rows = reference(build_model(family, attention="eager"))

    result, found = step_of(build_model(family), micro_batch_tokens=64)

    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert result.losses == pytest.approx(by_rows, rel=1e-6)
    assert result.grad_norm == pytest.approx(math.sqrt(sum(float(grad.square().sum()) for grad in grads.values())))
    assert_same_grads(found, grads)


@pytest.mark.parametrize("micro_batch", [64, 128, 256])
def test_the_split_into_micro_batches_changes_neither_loss_nor_gradient(micro_batch):
    """8 × 1 against 4 × 2, 2 × 4 and 1 × 8."""
    alone, wanted = step_of(build_model(), micro_batch_tokens=32)

    together, found = step_of(build_model(), micro_batch_tokens=micro_batch)

    assert together.loss == pytest.approx(alone.loss, rel=1e-6)
    assert_same_grads(found, wanted)


def test_a_mean_of_micro_batch_means_would_have_been_noticed():
    means = [step_of(build_model(), [slot])[0].loss for slot in PICKS]

    assert abs(sum(means) / len(means) - step_of(build_model())[0].loss) > 1e-3


@pytest.mark.parametrize("micro_batch", [32, 128])
def test_the_order_of_rows_changes_neither_loss_nor_gradient(micro_batch):
    first, wanted = step_of(build_model(), micro_batch_tokens=micro_batch)

    second, found = step_of(
        build_model(), [PICKS[at] for at in (6, 2, 7, 0, 5, 1, 4, 3)], micro_batch_tokens=micro_batch
    )

    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.losses == pytest.approx(first.losses, rel=1e-6)
    assert_same_grads(found, wanted)


def test_the_losses_of_rows_sets_add_up_to_the_loss():
    result, _ = step_of(build_model())
    counts = dict.fromkeys(ROWS, 0)
    for slot in PICKS:
        for name, index in slot:
            row = ROWS[name][index]
            counts[name] += int((labels(row.tokens, row.doc_lens, row.loss_mask) != -100).sum())

    total = sum(result.losses[name] * counts[name] for name in ROWS)

    assert total / sum(counts.values()) == pytest.approx(result.loss, rel=1e-6)
    assert abs(result.losses["long"] - result.losses["short"]) > 1e-3


def test_recomputing_activations_changes_nothing():
    _, wanted = step_of(build_model().train())
    model = build_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    _, found = step_of(model)

    assert_same_grads(found, wanted)


def test_attention_of_the_stage_is_used():
    documents, _ = step_of(build_model())
    full, _ = step_of(build_model(), attention="full")

    assert abs(documents.loss - full.loss) > 1e-3


# Steps that are not numbers


def poisoned_weight(model: Any) -> None:
    model.base_model.norm.weight.data[0] = torch.inf


def poisoned_gradient(model: Any) -> None:
    model.base_model.norm.weight.register_hook(lambda grad: grad * torch.inf)


@pytest.mark.parametrize("poison", [poisoned_weight, poisoned_gradient])
def test_a_step_that_is_not_a_number_updates_nothing(poison):
    model = build_model()
    poison(model)
    stage = build_stage(batch_tokens=256, tokens=256)
    updater = build_updater(stage, model)
    before = {name: tensor.clone() for name, tensor in updater.state_tensors().items()}

    result = run_step(stage, model, updater)

    assert not result.finite
    assert all(torch.equal(tensor, before[name]) for name, tensor in updater.state_tensors().items())
    assert all(parameter.grad is None for parameter in model.parameters()), "the next step would start from this one"


def test_a_step_without_any_label_has_no_loss_and_no_gradient():
    rows = {"long": [random_row((32,), 0, mask=1.0)]}
    model, stage = build_model(), build_stage(batch_tokens=32, tokens=32)
    recorder = Recorder(model)

    result = run_step(stage, model, recorder, [[("long", 0)]], rows)

    assert (result.loss, result.losses, result.grad_norm) == (0.0, {"long": 0.0}, 0.0)
    assert all((grad == 0).all() for grad in recorder.grads.values())
