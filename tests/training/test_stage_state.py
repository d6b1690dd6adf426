"""A stage goes on from the weights that the one before it trained, not from those that its export rounded."""

import pytest
import torch
from safetensors.torch import load_file

from factory import build_model, build_stage, random_tokens
from unspool.training.checkpoint.resume import OPTIMIZER, load_stage_weights, save_stage_state
from unspool.training.optim.updater import build_updater


def trained(**changes):
    model = build_model(**changes)
    updater = build_updater(build_stage(), model)
    for seed in range(2):
        updater.begin(1e-3)
        model(random_tokens(12, seed=seed)).logits.square().mean().backward()
        updater.finish(is_good=True)
    return model, updater


def test_weights_that_an_export_rounds_are_kept_and_come_back(tmp_path):
    model, updater = trained()
    save_stage_state(tmp_path / OPTIMIZER, updater, exported=torch.bfloat16)
    rounded = build_model()
    rounded.load_state_dict({name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    assert not torch.equal(rounded.lm_head.weight, model.lm_head.weight)

    load_stage_weights(rounded, load_file(tmp_path / OPTIMIZER))

    wanted = dict(model.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in rounded.named_parameters())


@pytest.mark.parametrize(("exported", "kept"), [(torch.float32, 0), (torch.bfloat16, 21)])
def test_only_what_the_export_does_not_hold_is_written(exported, kept, tmp_path):
    updater = trained()[1]
    save_stage_state(tmp_path / OPTIMIZER, updater, exported=exported)

    saved = load_file(tmp_path / OPTIMIZER)
    assert (
        len([name for name in saved if name.endswith("/weight")])
        == kept
        == (0 if not kept else len(list(updater.named_masters())))
    )
    assert len([name for name in saved if name.endswith("/exp_avg")]) == 21


def test_rows_that_were_added_to_an_embedding_keep_what_they_start_with(tmp_path):
    model, updater = trained()
    save_stage_state(tmp_path / OPTIMIZER, updater, exported=torch.bfloat16)
    grown = build_model(vocab_size=310)
    new = grown.lm_head.weight.detach()[300:].clone()

    load_stage_weights(grown, load_file(tmp_path / OPTIMIZER))

    assert torch.equal(grown.lm_head.weight[:300], model.lm_head.weight)
    assert torch.equal(grown.lm_head.weight[300:], new)
    updater = build_updater(build_stage(), grown)
    updater.load_optimizer(load_file(tmp_path / OPTIMIZER))
    moments = updater.optimizer_tensors()["lm_head.weight/exp_avg"]
    assert moments[:300].abs().sum() > 0
    assert (moments[300:] == 0).all()
