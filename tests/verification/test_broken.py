"""Mistakes made on purpose, in the code that training and export really run: each is caught by the check named.

That the same checks pass without them is what test_checks.py shows.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unspool.models.attention.interface
import unspool.models.loss
import unspool.models.memory.checkpointing
import unspool.training.batch
import unspool.training.checkpoint.resume
import unspool.training.loader
import unspool.training.loop
import unspool.training.step
import unspool.verification.interruptions
from unspool.models.memory.offload import Offloader
from unspool.models.rotary import rotate_heads
from unspool.training.optim.updater import Updater

from .mistakes import average_micro_batches, cross_documents, leak_attention, set_attention_lens, weigh_loss


def caught(found) -> bool:
    assert all(result.status != "skipped" and result.error is not None for result in found), found
    return any(result.status == "failed" for result in found)


# Promise 1


def test_labels_that_cross_documents(monkeypatch, case, results):
    cross_documents(monkeypatch)
    assert caught(results("packing", case("llama")))


@pytest.mark.parametrize("check", ["packing", "isolation"])
def test_attention_that_ignores_where_documents_end(check, monkeypatch, case, results):
    leak_attention(monkeypatch)
    assert caught(results(check, case("llama")))


@pytest.mark.parametrize("check", ["packing", "isolation"])
def test_attention_that_lets_one_token_through(check, monkeypatch, case, results):
    """Documents that end one token too late."""

    def shifted(doc_lens):
        first, *middle, last = doc_lens
        return (first + 1, *middle, last - 1)

    set_attention_lens(monkeypatch, shifted)
    assert caught(results(check, case("llama")))


def test_positions_that_do_not_restart(monkeypatch, case, results):
    monkeypatch.setattr(unspool.training.batch, "position_ids", lambda lens: np.arange(lens.sum()))
    found = results("packing", case("llama"))
    assert [result.quantity for result in found if result.status == "failed"] == ["positions"]


def test_a_window_that_is_not_kept(case, results):
    broken = case("mistral")
    for layer in broken.model.base_model.layers:
        layer.self_attn.config.sliding_window = None
    assert caught(results("packing", broken))


def turning_keys_otherwise(query, key, inv_freq, position_ids):
    turned, _ = rotate_heads(query, key, inv_freq, position_ids)
    _, other = rotate_heads(query, key, inv_freq.flip(0), position_ids)
    return turned, other


@pytest.mark.parametrize("check", ["packing", "position-shift", "export"])
def test_queries_and_keys_of_a_head_rotated_with_different_bases(check, monkeypatch, case, results):
    monkeypatch.setattr(unspool.models.attention.interface, "rotate_heads", turning_keys_otherwise)
    assert caught(results(check, case("qwen3+harpe")))


# Promise 2


def test_a_loss_that_is_averaged_in_every_micro_batch(monkeypatch, case, results):
    average_micro_batches(monkeypatch)
    assert caught(results("micro-batches", case("llama")))


def test_a_step_that_weighs_its_first_rows_more(monkeypatch, case, results):
    weigh_loss(monkeypatch, lambda labels, number: 1 + 1e-3 / number)
    assert caught(results("row-order", case("llama")))


def test_weighted_losses_that_are_divided_by_the_number_of_labels(monkeypatch, case, results):
    monkeypatch.setattr(unspool.training.batch.Batch, "row_weights", property(lambda batch: list(batch.num_valid)))
    assert caught(results("loss-weights", case("llama")))


def test_weights_of_the_label_before(monkeypatch, case, results):
    true = unspool.training.step.summed_loss
    monkeypatch.setattr(
        unspool.training.step,
        "summed_loss",
        lambda *args, weights, **more: true(*args, weights=weights.roll(1), **more),
    )
    assert caught(results("loss-weights", case("llama")))


def test_weighted_losses_that_are_averaged_in_every_micro_batch(monkeypatch, case, results):
    average_micro_batches(monkeypatch)
    assert caught(results("loss-weights", case("llama")))


# Promise 3


def quantities(found) -> list[str]:
    return [result.quantity for result in found if result.status == "failed"]


def test_moments_that_are_not_restored(monkeypatch, case, results):
    monkeypatch.setattr(Updater, "load_optimizer", lambda updater, saved: None)
    assert quantities(results("resume", case("llama"))) == ["bits"]


def test_weights_that_are_restored_rounded(monkeypatch, case, results):
    true = Updater.load_state_tensors

    def rounding(updater, saved):
        true(updater, {name: tensor.bfloat16() if "/weight" in name else tensor for name, tensor in saved.items()})

    monkeypatch.setattr(Updater, "load_state_tensors", rounding)
    assert quantities(results("resume", case("llama"))) == ["bits"]


def test_random_numbers_that_do_not_go_on(monkeypatch, case, results):
    true = unspool.training.loop.learning_rate
    by_chance = lambda stage, step: true(stage, step) * (1 + float(torch.rand(())))  # noqa: E731
    monkeypatch.setattr(unspool.training.loop, "learning_rate", by_chance)
    assert not caught(results("resume", case("llama")))

    monkeypatch.setattr(unspool.training.checkpoint.resume, "set_random_state", lambda state: None)
    assert quantities(results("resume", case("llama"))) == ["bits"]


@pytest.mark.parametrize("by", [1, -1])
def test_rows_that_go_on_one_place_off(by, monkeypatch, case, results):
    true = unspool.training.loader.step_picks

    def shifted(stage, mix, step, **options):
        # Only a resumed run, whose first step is a later one, goes on at the wrong place.
        moved = (step - 1 + by) % stage.steps + 1 if first > 1 else step
        return true(stage, mix, moved, **options)

    true_load = unspool.training.loop.load_steps
    first = 1

    def load(*args, **options):
        nonlocal first
        first = options["first"]
        return true_load(*args, **options)

    monkeypatch.setattr(unspool.training.loop, "load_steps", load)
    monkeypatch.setattr(unspool.training.loader, "step_picks", shifted)
    assert quantities(results("resume", case("llama"))) == ["bits", "ledger"]


def test_a_ledger_that_is_not_cut_back_to_its_checkpoint(monkeypatch, case, results):
    true = unspool.verification.interruptions.resume
    monkeypatch.setattr(
        unspool.verification.interruptions, "resume", lambda *args, logs, **rest: true(*args, logs=(), **rest)
    )
    assert quantities(results("resume", case("llama"))) == ["ledger"]


def test_a_step_that_is_done_twice(monkeypatch, case, results):
    """Resuming one step before the checkpoint that was loaded."""
    true = unspool.verification.interruptions.resume

    def early(*args, **options):
        return max(0, true(*args, **options) - 1)

    monkeypatch.setattr(unspool.verification.interruptions, "resume", early)
    assert quantities(results("resume", case("llama"))) == ["bits", "ledger"]


# Promise 4


def test_an_export_with_another_base(case, results):
    broken = case("llama")
    broken.model.config.rope_parameters = {**broken.model.config.rope_parameters, "rope_theta": 20_000.0}
    assert caught(results("export", broken))


def test_an_export_with_the_bases_of_heads_in_another_order(case, results):
    broken = case("qwen3+harpe")
    broken.model.base_model.head_bases = broken.model.base_model.head_bases[::-1]
    assert caught(results("export", broken))


def saving(model, change):
    """Let `model` be written with other weights than it has."""
    saved = model.save_pretrained
    model.save_pretrained = lambda folder, state_dict, **options: saved(
        folder, state_dict=change(state_dict), **options
    )


def test_an_export_that_forgets_the_values_of_a_bias(case, results):
    broken = case("qwen2")
    name = "model.layers.0.self_attn.q_proj.bias"
    saving(broken.model, lambda weights: weights | {name: torch.zeros_like(weights[name])})
    assert caught(results("export", broken))


def test_an_export_that_lacks_a_weight(case, results):
    broken = case("llama")
    lost = "model.layers.1.mlp.up_proj.weight"
    saving(broken.model, lambda weights: {name: tensor for name, tensor in weights.items() if name != lost})

    (result,) = results("export", broken)

    assert (result.status, result.error) == ("failed", None)
    assert "plain transformers cannot load the export" in result.detail
    assert lost in result.detail


def test_tables_computed_in_bf16(case, results):
    broken = case("llama")
    rotary = broken.model.base_model.rotary_emb

    def rounded(hidden, position_ids):
        angles = position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().float(), angles.sin().float()

    rotary.forward = rounded
    assert caught(results("rope-tables", broken))
    assert caught(results("packing", broken))


def test_frequencies_of_heads_rounded_to_bf16(case, results):
    """As `model.to(torch.bfloat16)` does to a buffer."""
    broken = case("qwen3+harpe")
    for layer in broken.model.base_model.layers:
        layer.self_attn.head_inv_freq = layer.self_attn.head_inv_freq.bfloat16().float()
    assert caught(results("rope-tables", broken))
    assert caught(results("packing", broken))


# Promise 5


def test_a_loss_that_forgets_the_last_chunk(monkeypatch, case, results):
    rows = unspool.models.loss._valid_rows
    monkeypatch.setattr(unspool.models.loss, "_valid_rows", lambda *args: rows(*args)[:-1])
    assert caught(results("chunked-loss", case("llama")))


def detaching_tiles(part, tile_len):
    whole = part.forward
    part.forward = lambda hidden: torch.cat([whole(tile.detach()) for tile in hidden.split(tile_len, dim=1)], dim=1)


@pytest.mark.parametrize("check", ["mlp-tiles", "all-memory"])
def test_tiles_that_pass_no_gradient_on(check, monkeypatch, case, results):
    monkeypatch.setattr(unspool.models.memory.checkpointing, "apply_tiles", detaching_tiles)
    assert caught(results(check, case("llama")))


def forgetting_recompute(layers, *_):
    for layer in layers:
        layer.forward = torch.no_grad()(layer.forward)


@pytest.mark.parametrize("check", ["activation-checkpointing", "keep-attention", "layers-per-checkpoint", "offload"])
def test_layers_whose_gradient_is_never_computed(check, monkeypatch, case, results):
    monkeypatch.setattr(unspool.models.memory.checkpointing, "apply_checkpointing", forgetting_recompute)
    assert caught(results(check, case("llama")))


class Rounding(Offloader):
    """Brings tensors back in half of the bytes."""

    def put(self, tensor, *, before=None):
        return super().put(tensor.bfloat16().to(tensor.dtype), before=before)


def test_activation_checkpoints_that_are_restored_rounded(monkeypatch, case, results):
    monkeypatch.setattr(unspool.models.memory.checkpointing, "Offloader", Rounding)
    assert caught(results("offload", case("llama")))


def test_heads_that_are_reassembled_in_another_order(monkeypatch, case, results):
    in_chunks = unspool.models.memory.checkpointing.apply_head_chunks

    def mixed(layers, *, heads_at_once):
        in_chunks(layers, heads_at_once=heads_at_once)
        for layer in layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: inputs[0].roll(16, dims=-1))

    monkeypatch.setattr(unspool.models.memory.checkpointing, "apply_head_chunks", mixed)
    assert caught(results("heads-at-once", case("llama")))


# What no error may hide


def test_weights_that_are_not_numbers(case, results):
    broken = case("llama")
    broken.model.base_model.norm.weight.data[0] = torch.nan
    # `train_step` refuses to apply such a step, so that no gradient arrives either.
    for result in results("chunked-loss", replace(broken)):
        assert result.status == "passed", "the loss check brings states of its own"
    assert caught(results("export", broken))
