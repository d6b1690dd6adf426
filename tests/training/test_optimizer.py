"""The update: which parameters, at which rate, clipped to what; and torch's AdamW itself in fp32."""

from typing import Any

import pytest
import torch

from factory import build_model, build_stage
from unspool.core.errors import ConfigError
from unspool.training.optim.adamw import AdamW, factors_of, update_by_operators
from unspool.training.optim.base import Rates
from unspool.training.optim.updater import build_updater

from .optimizer_runs import adamw_param, assert_same, copied, small_model, start, take

PLAIN = {"weights": "fp32", "states": "fp32", "step": "after"}


def give_gradients(model: Any, value: float | None = None) -> dict[str, torch.Tensor]:
    """As a backward pass would: through what listens to each parameter."""
    given = {}
    rng = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=rng) if value is None else torch.full(parameter.shape, value)
            given[name] = drawn.to(parameter.dtype)
            (parameter * given[name]).sum().backward()
    return given


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return copied(dict(model.named_parameters()))


# Against torch


def steps_of_torch(num_steps: int) -> dict[str, torch.Tensor]:
    """The same steps by torch's own parts, top to bottom."""
    model = small_model()
    groups = [
        {"params": [one for one in model.parameters() if (one.dim() > 1) is decayed], "weight_decay": 0.1 * decayed}
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    class Plain:
        def begin(self, lr: float) -> None:
            optimizer.zero_grad()

        def finish(self, **_: Any) -> float:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return float(norm)

    plain: Any = Plain()
    take(model, plain, build_stage(batch_tokens=64, micro_batch_tokens=32), range(num_steps))
    return weights_of(model)


def test_fp32_is_torchs_own_adamw_bit_for_bit():
    model, updater, stage = start(PLAIN, batch_tokens=64, micro_batch_tokens=32, tokens=64)

    results = take(model, updater, stage, range(4))

    assert_same(weights_of(model), steps_of_torch(4))
    assert min(result.grad_norm for result in results) > 1, "nothing was clipped, so clipping was not compared"


def apart_from_torch(*, count_from: int) -> float:
    """Largest difference after some steps of our own formula, which 8-bit and bf16 modes use, with all in fp32."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64, generator=rng) * 0.02)
    ours = adamw_param("w", weight.data.clone(), None, weight_decay=0.1, in_8bit=False)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rates = Rates(lr=1e-3, betas=(0.9, 0.95), seed=0, scale=1.0)
    for step in range(5):
        weight.grad = torch.randn(64, 64, generator=rng)
        update_by_operators(ours, weight.grad, factors_of(rates, 1.0, 0.1, count_from + step), (0, 0))
        optimizer.step()
    return float((ours.weight - weight.data).abs().max())


def test_our_own_formula_is_that_of_torch_and_a_wrong_bias_correction_is_noticed():
    # A rounding of fp32 at weights of up to 0.1, some times over.
    assert apart_from_torch(count_from=1) < 5e-8
    assert apart_from_torch(count_from=2) > 1e-4


# Which parameters, and at which rate


def test_weight_decay_leaves_norms_and_biases_alone():
    model = build_model("qwen2")
    updater = build_updater(build_stage(lr=0.5, weight_decay=0.1), model)
    before = weights_of(model)

    updater.begin(0.5)
    give_gradients(model, 0.0)
    updater.finish(is_good=True)

    vectors = [name for name in before if "norm" in name or "bias" in name]
    assert len(vectors) == 11, "two norms and three biases in each of two layers, and the last norm"
    for name, parameter in model.named_parameters():
        wanted = before[name] if name in vectors else before[name] * (1 - 0.5 * 0.1)
        torch.testing.assert_close(parameter.detach(), wanted, msg=name)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_every_weight_is_trained_once(family):
    model = build_model(family)

    masters = list(build_updater(build_stage(), model).named_masters())

    assert [name for name, _ in masters] == [name for name, _ in model.named_parameters()]
    assert len({weight.data_ptr() for _, weight in masters}) == len(masters)


def test_lr_for_trains_parts_at_their_own_rate_and_leaves_others_alone():
    stage = build_stage(lr=1e-3, weight_decay=0.0, lr_overrides={"q_proj": 4e-3, "mlp": 0})
    model = build_model()
    before = weights_of(model)

    updater = build_updater(stage, model)
    updater.begin(1e-3)
    give_gradients(model, 1.0)
    updater.finish(is_good=True)

    for name, parameter in model.named_parameters():
        moved = float((parameter.detach() - before[name]).abs().max())
        assert moved == pytest.approx(0 if "mlp" in name else 4e-3 if "q_proj" in name else 1e-3, rel=1e-3), name
    assert not any("mlp" in name for name in updater.state_tensors())


@pytest.mark.parametrize(
    ("lr_overrides", "says"), [({"q_prj": 1e-3}, "which no parameter name contains"), ({".": 0}, "nothing is trained")]
)
def test_an_lr_for_that_cannot_be_meant_is_refused(lr_overrides, says):
    with pytest.raises(ConfigError, match=says):
        build_updater(build_stage(lr_overrides=lr_overrides), build_model())


# Clipping


def test_gradients_are_clipped_to_the_norm_asked_for_and_reported_as_they_were(monkeypatch):
    scales = []
    monkeypatch.setattr(AdamW, "step", lambda self, params, rates: scales.append(rates.scale))
    for clip in (1e9, 2.0):
        model = build_model()
        updater = build_updater(build_stage(max_grad_norm=clip), model)
        updater.begin(1e-3)
        given = give_gradients(model)
        norm = updater.finish(is_good=True)

        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(given.values())))
        assert norm > 10
    assert scales == [1.0, pytest.approx(2.0 / norm)]


def test_the_norm_is_asked_for_once_a_step(monkeypatch):
    """On a GPU every question waits for all that is queued."""
    model, updater, stage = start(PLAIN)
    asked = []
    true_item = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: asked.append(self.shape) or true_item(self))

    take(model, updater, stage, range(1))

    assert len(asked) == 1
