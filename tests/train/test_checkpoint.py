import pytest
import torch
from safetensors.torch import load_file

from factory import build_model, build_stage, random_tokens
from unspool.train.checkpoint import (
    KEEP,
    OPTIMIZER,
    WEIGHTS,
    checkpoints,
    load_checkpoint,
    load_moments,
    save_checkpoint,
    save_moments,
)
from unspool.train.optimizer import build_updater


def trained(family: str = "llama", steps: int = 2, **changes):
    model = build_model(family, **changes)
    optimizer = build_updater(build_stage(), model).optimizer
    for step in range(steps):
        update(model, optimizer, step)
    return model, optimizer


def update(model, optimizer, seed: int) -> None:
    model(random_tokens(12, seed=seed)).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_loaded_checkpoint_goes_on_bit_for_bit(family, tmp_path):
    model, optimizer = trained(family)
    save_checkpoint(tmp_path, model, optimizer, step=2)
    fresh, fresh_optimizer = trained(family, steps=0, seed=1)

    assert load_checkpoint(tmp_path, fresh, fresh_optimizer) == 2

    update(model, optimizer, seed=9)
    update(fresh, fresh_optimizer, seed=9)
    wanted = weights(model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(fresh).items())


def test_without_moments_the_next_update_would_differ(tmp_path):
    """So the test above would notice moments that were not loaded."""
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, optimizer, step=2)
    (fresh, fresh_optimizer), none = trained(steps=0, seed=1), trained(steps=0, seed=2)[1]
    load_checkpoint(tmp_path, fresh, none)

    update(model, optimizer, seed=9)
    update(fresh, fresh_optimizer, seed=9)

    wanted = weights(model)
    assert any(not torch.equal(tensor, wanted[name]) for name, tensor in weights(fresh).items())


def test_no_checkpoint_is_step_zero_and_changes_nothing(tmp_path):
    model, optimizer = trained()
    before = weights(model)

    assert load_checkpoint(tmp_path / "none", model, optimizer) == 0

    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


def test_the_newest_is_loaded_and_old_ones_are_removed(tmp_path):
    model, optimizer = trained()
    for step in (2, 4, 10, 100):
        save_checkpoint(tmp_path, model, optimizer, step=step)

    assert [path.name for path in checkpoints(tmp_path)] == ["step-000010", "step-000100"]
    assert len(checkpoints(tmp_path)) == KEEP
    assert load_checkpoint(tmp_path, *trained(steps=0)) == 100


def test_a_half_written_checkpoint_is_ignored_and_later_replaced(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, optimizer, step=2)
    torn = tmp_path / "step-000004.partial"
    torn.mkdir()
    (torn / WEIGHTS).write_bytes(b"half")

    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]
    assert load_checkpoint(tmp_path, *trained(steps=0)) == 2

    save_checkpoint(tmp_path, model, optimizer, step=4)
    assert not torn.exists()
    assert load_checkpoint(tmp_path, *trained(steps=0)) == 4


def test_tied_weights_are_saved_once(tmp_path):
    save_checkpoint(tmp_path, *trained("llama-tied"), step=1)

    saved = load_file(tmp_path / "step-000001" / WEIGHTS)
    assert "lm_head.weight" not in saved
    assert "lm_head.weight/exp_avg" not in load_file(tmp_path / "step-000001" / OPTIMIZER)


def test_moments_of_embeddings_added_since_start_at_zero(tmp_path):
    model, optimizer = trained()
    save_moments(tmp_path / OPTIMIZER, model, optimizer)
    grown, grown_optimizer = trained(steps=0, vocab_size=310)

    load_moments(tmp_path / OPTIMIZER, grown, grown_optimizer)

    old = optimizer.state[model.get_input_embeddings().weight]
    new = grown_optimizer.state[grown.get_input_embeddings().weight]
    assert new["step"] == old["step"] == 2
    for key in ("exp_avg", "exp_avg_sq"):
        assert old[key].abs().sum() > 0
        assert torch.equal(new[key][:300], old[key])
        assert (new[key][300:] == 0).all()
        assert new[key].shape == (310, 32)
