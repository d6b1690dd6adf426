"""Every mode of the optimizer: goes on from its state bit for bit, trains alike, and takes the bytes that are told."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from unspool.models.memory.checkpointing import apply_memory
from unspool.training.optim import adamw as adamw_module
from unspool.training.optim import updater as optimizer_module
from unspool.training.optim.adamw import AdamW
from unspool.training.optim.adamw8bit import Quantized
from unspool.training.optim.base import ParamState, Rates
from unspool.training.optim.config import AdamWConfig
from unspool.training.optim.updater import Updater

from .optimizer_runs import MODES, adamw_param, assert_same, copied, mode_name, small_model, stage_of, start, take

every_mode = pytest.mark.parametrize("mode", MODES, ids=mode_name)
both_weights = pytest.mark.parametrize("weights", ["fp32", "bf16"])
both_states = pytest.mark.parametrize("states", ["fp32", "8bit"])
MEMORY = Path(__file__).parents[2] / "docs" / "concepts" / "memory.md"


# Going on


def interrupted(mode: dict[str, str], *, forget: str = "nothing"):
    """Four steps, state out, a new model and updater, state in, two more steps."""
    model, updater, stage = start(mode)
    take(model, updater, stage, range(4))
    saved = copied(updater.state_tensors())
    again, later, _ = start(mode)
    kept = {name: tensor for name, tensor in saved.items() if forget not in name}
    later.load_state_tensors({**later.state_tensors(), **kept} if forget != "nothing" else saved)
    results = take(again, later, stage, range(4, 6))
    return results, later.state_tensors(), dict(again.named_parameters())


@cache
def uninterrupted(weights: str, states: str, step: str):
    model, updater, stage = start({"weights": weights, "states": states, "step": step})
    results = take(model, updater, stage, range(6))[4:]
    return results, updater.state_tensors(), dict(model.named_parameters())


@every_mode
def test_a_run_goes_on_from_its_state_bit_for_bit(mode):
    results, state, parameters = interrupted(mode)
    wanted_results, wanted_state, wanted_parameters = uninterrupted(**mode)

    assert results == wanted_results
    assert_same(state, wanted_state)
    assert_same(parameters, wanted_parameters)


@pytest.mark.parametrize("forgotten", ["/exp_avg", "/step", "updater/norm_before"])
def test_what_is_not_saved_is_noticed(forgotten):
    mode = {"weights": "bf16", "states": "8bit", "step": "in-backward"}

    _, state, _ = interrupted(mode, forget=forgotten)

    with pytest.raises(AssertionError):
        assert_same(state, uninterrupted(**mode)[1])


@both_weights
def test_the_seed_of_rounding_is_part_of_the_state(weights):
    model, updater, stage = start({"weights": weights})
    saved = updater.state_tensors() | {"updater/seed": torch.tensor(7)}
    other, later, _ = start({"weights": weights})
    later.load_state_tensors(saved)
    for one, its in ((model, updater), (other, later)):
        take(one, its, stage, range(1))

    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert same == (weights == "fp32")


@both_states
def test_moments_are_handed_on_to_a_stage_of_another_kind(states):
    model, updater, stage = start({"states": states})
    take(model, updater, stage, range(3))
    saved = copied(updater.optimizer_tensors())
    other = "8bit" if states == "fp32" else "fp32"
    _, later, _ = start({"states": other})

    later.load_optimizer(saved)

    for one, its in zip(updater._params, later._params, strict=True):
        assert its.state.count == one.state.count == int(its.state.steps) == 3
        wanted, found = (
            moment.read() if isinstance(moment, Quantized) else moment for moment in (one.state.first, its.state.first)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.04 * float(wanted.abs().max()))
        assert (found != 0).any()


def test_rows_added_to_an_embedding_start_without_moments():
    small, large = (adamw_param("e", torch.zeros(rows, 64), None, weight_decay=0, in_8bit=True) for rows in (64, 68))
    assert isinstance(small.state.first, Quantized)
    small.state.first.write(torch.ones(64, 64))
    small.state.set_count(2)

    AdamW().load_state(large, AdamW().state_tensors(small))

    assert isinstance(large.state.first, Quantized)
    assert large.state.first.read()[:64].eq(1).all()
    assert large.state.first.read()[64:].eq(0).all()


# Stepping in the backward pass


@both_weights
@both_states
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_in_backward_is_the_same_where_nothing_is_clipped(weights, states, family):
    found, wanted = [], []
    for step, into in (("after", wanted), ("in-backward", found)):
        mode = {"weights": weights, "states": states, "step": step}
        model, updater, stage = start(mode, family=family, max_grad_norm=1e9)
        into += [take(model, updater, stage, range(3)), updater.state_tensors(), dict(model.named_parameters())]
        assert all(parameter.grad is None for parameter in model.parameters())

    assert found[0] == wanted[0]
    assert_same(found[1], wanted[1])
    assert_same(found[2], wanted[2])


@pytest.mark.parametrize(
    "memory",
    [
        {"activation_checkpointing": "full", "layers_per_checkpoint": 2},
        {"activation_checkpointing": "full", "offload": True, "mlp_tiles": 8},
    ],
    ids=["shared", "tiled"],
)
def test_in_backward_steps_no_weight_that_is_still_needed_where_layers_are_computed_again(memory):
    found = []
    for step in ("after", "in-backward"):
        model, stage = small_model(), stage_of({"step": step}, max_grad_norm=1e9, **memory)
        apply_memory(model, stage.memory)
        updater = optimizer_module.build_updater(stage, model)
        take(model, updater, stage, range(2))
        found.append(updater.state_tensors())

    assert_same(found[1], found[0])


def test_gradients_are_gone_before_the_backward_pass_ends():
    model, updater, stage = start({"step": "in-backward"})
    held = []
    embedding = model.get_input_embeddings().weight
    embedding.register_hook(lambda grad: held.append(sum(one.grad is not None for one in updater._params)))

    take(model, updater, stage, range(1))

    assert held == [0], "the embedding's gradient is the last, and all others have been used by then"


def test_a_tied_weight_that_gets_two_gradients_is_not_stepped_twice():
    model, updater, _ = start({"step": "in-backward"}, family="llama-tied")
    weight = model.get_input_embeddings().weight
    updater.begin(1e-3)
    weight.sum().backward()

    with pytest.raises(AssertionError, match="second gradient"):
        weight.sum().backward()


def test_clipping_goes_by_the_norm_of_the_step_before(monkeypatch):
    scales = []
    true_step = AdamW.step_in_backward
    monkeypatch.setattr(
        AdamW,
        "step_in_backward",
        lambda self, one, rates, norm: scales.append(rates.scale) or true_step(self, one, rates, norm),
    )
    model, updater, stage = start({"step": "in-backward"}, max_grad_norm=0.5)

    results = take(model, updater, stage, range(3))

    per_step = len(list(model.parameters()))
    norms = [result.grad_norm for result in results]
    assert min(norms) > 0.5
    assert scales[::per_step] == pytest.approx([1.0, 0.5 / norms[0], 0.5 / norms[1]], rel=1e-5)


def test_in_backward_a_gradient_that_is_not_finite_leaves_its_parameter_alone_and_is_reported():
    model, updater, stage = start({"step": "in-backward"})
    norm_weight = model.base_model.norm.weight
    norm_weight.register_hook(lambda grad: grad * torch.inf)
    before = copied(updater.state_tensors())

    (result,) = take(model, updater, stage, range(1))

    assert not result.finite
    assert updater.in_backward, "what tells the loop that weights have changed"
    changed = {name for name, tensor in updater.state_tensors().items() if not torch.equal(tensor, before[name])}
    assert not any(name.startswith("model.norm.weight") for name in changed)
    assert "lm_head.weight/weight" in changed
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_in_backward_needs_one_micro_batch():
    with pytest.raises(ValidationError, match=r"batch_tokens must equal micro_batch_tokens \(32 tokens\)"):
        stage_of({"step": "in-backward"}, batch_tokens=64, tokens=64)
    stage_of({"step": "in-backward"}, batch_tokens=64, tokens=64, micro_batch_tokens=64)


# bf16


def accumulate(param: ParamState, grad: torch.Tensor) -> None:
    updater = Updater(
        torch.nn.Module(), [param], AdamW(), betas=(0.9, 0.95), max_grad_norm=1.0, seed=0, in_backward=False
    )
    updater.add({param.name: grad})


def test_tables_of_positions_stay_fp32():
    model, updater, stage = start({"weights": "bf16"})
    tables: list[torch.Tensor] = []
    model.base_model.rotary_emb.register_forward_hook(lambda module, inputs, out: tables.extend(out))

    take(model, updater, stage, range(1))

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert {table.dtype for table in tables} == {torch.float32}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_gradients_of_micro_batches_are_added_in_fp32(micro_batches):
    """2⁻⁹ at a time, which bf16 would lose beside 1."""
    weight = torch.zeros(4096, dtype=torch.bfloat16)
    one = adamw_param("w", weight, None, weight_decay=0, in_8bit=True)
    for number in range(micro_batches):
        accumulate(one, torch.full((4096,), 2.0**-9 if number else 1.0, dtype=torch.bfloat16))

    assert one.grad is not None
    assert one.grad.dtype == (torch.float32 if micro_batches > 1 else torch.bfloat16)
    assert (one.grad == 1 + (micro_batches - 1) * 2.0**-9).all()


def drift(monkeypatch, *, nearest: bool) -> float:
    """Mean of weights of 1 after 50 steps down of 1e-4 each, a fortieth of what bf16 can say near 1."""
    if nearest:
        monkeypatch.setattr(adamw_module, "round_stochastic", lambda value, key: value.bfloat16())
    one = adamw_param("w", torch.ones(8192, dtype=torch.bfloat16), None, weight_decay=0, in_8bit=True)
    for _ in range(50):
        one.grad = torch.ones(8192, dtype=torch.bfloat16)
        AdamW().step([one], Rates(lr=1e-4, betas=(0.9, 0.95), seed=0, scale=1.0))
    return float(one.weight.double().mean())


def test_small_updates_arrive_on_average_and_would_be_lost_by_rounding_to_the_nearest(monkeypatch):
    assert drift(monkeypatch, nearest=False) == pytest.approx(1 - 50e-4, abs=2e-4)
    assert drift(monkeypatch, nearest=True) == 1.0


# Training


@cache
def trained_losses(weights: str, states: str, step: str) -> list[float]:
    """The same four rows over and over."""
    model, updater, stage = start({"weights": weights, "states": states, "step": step}, lr=5e-3)
    return [result.loss for result in take(model, updater, stage, range(16))]


@every_mode
def test_every_mode_trains_to_the_same_loss(mode):
    """Within 5 % of what fp32 gains."""
    losses, wanted = trained_losses(**mode), trained_losses("fp32", "fp32", mode["step"])

    gained = wanted[0] - sum(wanted[-4:]) / 4
    assert gained > 2
    assert abs(sum(losses[-4:]) - sum(wanted[-4:])) / 4 < 0.05 * gained


# What it takes


def held_bytes(mode: dict[str, str], *, on_gpu: bool) -> float:
    """Bytes per parameter of a large matrix between backward and update, from the tensors themselves."""
    config = AdamWConfig.model_validate(mode)
    size = 1 << 16
    in_bf16 = on_gpu or config.weights == "bf16"
    parameter = torch.zeros(size, dtype=torch.bfloat16 if in_bf16 else torch.float32)
    has_master = in_bf16 and config.weights == "fp32"
    weight = torch.zeros(size) if has_master else parameter
    one = adamw_param("w", weight, parameter if has_master else None, weight_decay=0, in_8bit=config.states == "8bit")
    held = [parameter, *([weight] if has_master else [])]
    for moment in (one.state.first, one.state.second):
        held += [moment.codes, moment.scales] if isinstance(moment, Quantized) else [moment]
    if config.step == "after":
        accumulate(one, torch.zeros_like(parameter))
        assert one.grad is not None
        held.append(one.grad)
    return sum(tensor.numel() * tensor.element_size() for tensor in held) / size


# On a GPU and on a CPU, after the last backward pass of a step with one micro-batch.
BYTES = {
    ("fp32", "fp32", "after"): [18.0, 16.0],
    ("fp32", "fp32", "in-backward"): [14.0, 12.0],
    ("fp32", "8bit", "after"): [10.0, 10.0],
    ("fp32", "8bit", "in-backward"): [8.0, 6.0],
    ("bf16", "fp32", "after"): [12.0, 12.0],
    ("bf16", "fp32", "in-backward"): [10.0, 10.0],
    ("bf16", "8bit", "after"): [6.0, 6.0],
    ("bf16", "8bit", "in-backward"): [4.0, 4.0],
}


@every_mode
def test_the_bytes_per_parameter_do_not_grow(mode):
    held = [round(held_bytes(mode, on_gpu=on_gpu), 1) for on_gpu in (True, False)]
    assert held == BYTES[mode["weights"], mode["states"], mode["step"]]


def test_the_page_about_memory_names_these_bytes():
    (table,) = re.findall(r"^\| `optimizer` \|.*\n\|.*\n((?:\|.*\n)+)", MEMORY.read_text(), re.MULTILINE)
    told = [float(row.split("|")[2]) for row in table.splitlines()]
    settings = [
        ("fp32", "fp32", "after"),
        ("fp32", "8bit", "after"),
        ("bf16", "8bit", "after"),
        ("bf16", "8bit", "in-backward"),
    ]
    assert told == [BYTES[one][0] for one in settings]
