"""Mistakes made on purpose, in the code that training and export really run: each is caught by the check named.

That the same checks pass without them is what test_checks.py shows.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unspool.model.attention
import unspool.model.loss
import unspool.model.memory
import unspool.train.batch
import unspool.train.step
from unspool.data.labels import IGNORE
from unspool.model.offload import Offloader
from unspool.model.rotary import rotate_heads
from unspool.train.batch import Batch


def caught(found) -> bool:
    assert all(result.status != "skipped" and result.error is not None for result in found), found
    return any(result.status == "failed" for result in found)


# Promise 1


def test_labels_that_cross_documents(monkeypatch, case, results):
    def crossing(tokens, doc_lens, loss_mask):
        shifted = np.append(tokens[1:].astype(np.int64), IGNORE)
        if loss_mask is not None:
            shifted[:-1][~loss_mask[1:]] = IGNORE
        return shifted

    monkeypatch.setattr(unspool.train.batch, "labels", crossing)
    assert caught(results("packed", case("llama")))


@pytest.mark.parametrize("check", ["packed", "alone"])
def test_attention_that_ignores_where_documents_end(check, monkeypatch, case, results):
    def leaking(batch: Batch):
        return {
            "input_ids": batch.tokens[None],
            "position_ids": batch.position_ids[None],
            "doc_lens": (len(batch.tokens),),
        }

    monkeypatch.setattr(Batch, "model_inputs", property(leaking))
    assert caught(results(check, case("llama")))


@pytest.mark.parametrize("check", ["packed", "alone"])
def test_attention_that_lets_one_token_through(check, monkeypatch, case, results):
    """Documents that end one token too late."""

    def shifted(batch: Batch):
        first, *middle, last = batch.doc_lens
        return {
            "input_ids": batch.tokens[None],
            "position_ids": batch.position_ids[None],
            "doc_lens": (first + 1, *middle, last - 1),
        }

    monkeypatch.setattr(Batch, "model_inputs", property(shifted))
    assert caught(results(check, case("llama")))


def test_positions_that_do_not_restart(monkeypatch, case, results):
    monkeypatch.setattr(unspool.train.batch, "position_ids", lambda lens: np.arange(lens.sum()))
    found = results("packed", case("llama"))
    assert [result.quantity for result in found if result.status == "failed"] == ["positions"]


def test_a_window_that_is_not_kept(case, results):
    broken = case("mistral")
    for layer in broken.model.base_model.layers:
        layer.self_attn.config.sliding_window = None
    assert caught(results("packed", broken))


def turning_keys_otherwise(query, key, inv_freq, position_ids):
    turned, _ = rotate_heads(query, key, inv_freq, position_ids)
    _, other = rotate_heads(query, key, inv_freq.flip(0), position_ids)
    return turned, other


@pytest.mark.parametrize("check", ["packed", "moved", "export"])
def test_queries_and_keys_of_a_head_that_turn_by_different_bases(check, monkeypatch, case, results):
    monkeypatch.setattr(unspool.model.attention, "rotate_heads", turning_keys_otherwise)
    assert caught(results(check, case("qwen3+harpe")))


# Promise 2


def test_a_loss_that_is_averaged_in_every_micro_batch(monkeypatch, case, results):
    summed = unspool.train.step.summed_loss

    def averaged(hidden, head, labels, **options):
        total, losses = summed(hidden, head, labels, **options)
        share = 10 / max(1, int((labels != IGNORE).sum()))
        return total * share, losses * share

    monkeypatch.setattr(unspool.train.step, "summed_loss", averaged)
    assert caught(results("split", case("llama")))


def test_a_step_that_weighs_its_first_rows_more(monkeypatch, case, results):
    summed, calls = unspool.train.step.summed_loss, []

    def weighed(hidden, head, labels, **options):
        calls.append(0)
        total, losses = summed(hidden, head, labels, **options)
        return total * (1 + 1e-3 / len(calls)), losses

    monkeypatch.setattr(unspool.train.step, "summed_loss", weighed)
    assert caught(results("order", case("llama")))


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
    model.save_pretrained = lambda folder, state_dict: saved(folder, state_dict=change(state_dict))


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
    assert caught(results("tables", broken))
    assert caught(results("packed", broken))


def test_frequencies_of_heads_rounded_to_bf16(case, results):
    """As `model.to(torch.bfloat16)` does to a buffer."""
    broken = case("qwen3+harpe")
    for layer in broken.model.base_model.layers:
        layer.self_attn.head_inv_freq = layer.self_attn.head_inv_freq.bfloat16().float()
    assert caught(results("tables", broken))
    assert caught(results("packed", broken))


# Promise 5


def test_a_loss_that_forgets_the_last_chunk(monkeypatch, case, results):
    rows = unspool.model.loss._valid_rows
    monkeypatch.setattr(unspool.model.loss, "_valid_rows", lambda *args: rows(*args)[:-1])
    assert caught(results("chunked-loss", case("llama")))


def detaching_tiles(part, tile_len):
    whole = part.forward
    part.forward = lambda hidden: torch.cat([whole(tile.detach()) for tile in hidden.split(tile_len, dim=1)], dim=1)


@pytest.mark.parametrize("check", ["mlp-tiles", "all-memory"])
def test_tiles_that_pass_no_gradient_on(check, monkeypatch, case, results):
    monkeypatch.setattr(unspool.model.memory, "apply_tiles", detaching_tiles)
    assert caught(results(check, case("llama")))


def forgetting_recompute(layers, **_):
    for layer in layers:
        layer.forward = torch.no_grad()(layer.forward)


@pytest.mark.parametrize("check", ["recompute", "keep-attention", "recompute-every", "offload"])
def test_layers_whose_gradient_is_never_computed(check, monkeypatch, case, results):
    monkeypatch.setattr(unspool.model.memory, "apply_recompute", forgetting_recompute)
    assert caught(results(check, case("llama")))


class Rounding(Offloader):
    """Brings tensors back in half of the bytes."""

    def put(self, tensor, *, before):
        return super().put(tensor.bfloat16().to(tensor.dtype), before=before)


def test_checkpoints_that_come_back_rounded(monkeypatch, case, results):
    monkeypatch.setattr(unspool.model.memory, "Offloader", Rounding)
    assert caught(results("offload", case("llama")))


def test_heads_that_are_put_back_in_another_order(monkeypatch, case, results):
    in_parts = unspool.model.memory.apply_attention_parts

    def mixed(layers, *, heads_at_once):
        in_parts(layers, heads_at_once=heads_at_once)
        for layer in layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: inputs[0].roll(16, dims=-1))

    monkeypatch.setattr(unspool.model.memory, "apply_attention_parts", mixed)
    assert caught(results("heads-at-once", case("llama")))


# What no error may hide


def test_weights_that_are_not_numbers(case, results):
    broken = case("llama")
    broken.model.base_model.norm.weight.data[0] = torch.nan
    # `train_step` refuses to apply such a step, so that no gradient arrives either.
    for result in results("chunked-loss", replace(broken)):
        assert result.status == "passed", "the loss check brings states of its own"
    assert caught(results("export", broken))
