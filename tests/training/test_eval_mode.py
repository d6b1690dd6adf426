"""Validation and samples in the middle of training leave no trace in it."""

import numpy as np
import pytest
import torch

from factory import build_model, build_stage, build_tokenizer, random_row, save_rows
from unspool.models.memory.checkpointing import apply_memory
from unspool.training.metrics.validation import build_samples, build_validation, eval_mode

from .small_steps import assert_equal_bits, batch_of, train_once, trained_weights


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    return save_rows(tmp_path_factory.mktemp("held") / "held", [random_row((32,), seed) for seed in range(90, 94)])


@pytest.fixture
def look(held):
    """Everything that a stage may look at."""
    stage = build_stage(validation={"dataset": "held"}, samples={"prompts": ["the river"], "tokens": 5})

    def look(model):
        build_validation(stage, held, model, seed=0).measure(model)
        build_samples(stage, model, build_tokenizer()).write(model)

    return look


def test_a_run_that_looks_ends_with_the_bits_of_one_that_does_not(look):
    assert_equal_bits(trained_weights(look), trained_weights())


def test_the_comparison_would_notice_a_drawn_random_number():
    moved = trained_weights(lambda model: torch.rand(1))
    with pytest.raises(AssertionError):
        assert_equal_bits(moved, trained_weights())


def test_the_comparison_would_notice_a_model_left_in_evaluation_mode():
    moved = trained_weights(lambda model: model.base_model.layers.eval())
    with pytest.raises(AssertionError):
        assert_equal_bits(moved, trained_weights())


def test_positions_that_grow_with_the_text_are_put_back():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = build_model(rope_parameters=rope, max_position_embeddings=16)
    model.train()(input_ids=torch.zeros(1, 20, dtype=torch.long), use_cache=False)
    rotary = model.base_model.rotary_emb
    before = rotary.inv_freq.clone(), rotary.max_seq_len_cached

    with eval_mode(model):
        model(input_ids=torch.zeros(1, 40, dtype=torch.long), use_cache=False)
        assert rotary.max_seq_len_cached != before[1], "a longer text changes them, or this checks nothing"

    assert torch.equal(rotary.inv_freq, before[0])
    assert rotary.max_seq_len_cached == before[1]


def test_an_error_while_looking_leaves_the_model_in_training(look):
    model = build_model().train()
    with pytest.raises(ValueError, match="broken"), eval_mode(model):
        assert not model.training and not torch.is_grad_enabled()
        raise ValueError("broken")
    assert all(part.training for part in model.modules())


def test_compiled_code_is_neither_used_nor_changed():
    model = build_model().train()
    calls = []
    compiled = torch.compile(lambda x: x * 2, backend=lambda graph, example: calls.append(1) or graph.forward)
    model.base_model.layers[0].mlp.register_forward_hook(lambda module, args, out: compiled(out) / 2)

    with eval_mode(model):
        for count in (3, 5, 7):
            model(input_ids=torch.zeros(1, count, dtype=torch.long), use_cache=False)
    assert not calls

    model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
    assert calls, "outside it is compiled as ever"


@pytest.mark.parametrize(
    "memory",
    [
        {"activation_checkpointing": "full", "offload": True},
        {"activation_checkpointing": "keep-attention", "layers_per_checkpoint": 2},
        {"mlp_tiles": 8, "attention_heads_at_once": 1},
    ],
    ids=str,
)
def test_models_with_memory_settings_can_be_looked_at(memory, held):
    stage = build_stage(validation={"dataset": "held"}, samples={"prompts": ["the river"], "tokens": 5}, **memory)
    plain, saving = build_model(), build_model()
    apply_memory(saving, stage.memory)
    found = []
    for model in (plain, saving.train()):
        losses = build_validation(stage, held, model, seed=0).measure(model)
        found.append((losses, build_samples(stage, model, build_tokenizer()).write(model)))

    assert found[0][0]["loss"] == pytest.approx(found[1][0]["loss"], rel=1e-6)
    assert found[0][1] == found[1][1]
    assert np.isfinite(train_once(saving, torch.optim.AdamW(saving.parameters()), batch_of(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_look_on_a_gpu_leaves_weights_random_numbers_and_compiled_code_as_they_were(look, dtype):
    device = torch.device("cuda")
    model = build_model(hidden_size=64).to(device, dtype).train()
    for layer in model.base_model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_once(model, optimizer, batch_of(0).to(device))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    state, graphs = torch.cuda.get_rng_state(), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    look(model)

    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert np.isfinite(train_once(model, optimizer, batch_of(1).to(device)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "training was compiled again"
