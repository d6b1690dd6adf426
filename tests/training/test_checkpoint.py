"""A checkpoint gives back every bit, is complete or absent, and is known when it was damaged."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from factory import build_model, build_stage, random_tokens
from unspool.core import artifacts
from unspool.training.checkpoint import save as checkpoint_module
from unspool.training.checkpoint.save import KEEP, STATE, checkpoints, newest_checkpoint, write_checkpoint
from unspool.training.optim.updater import build_updater


def trained(family: str = "llama", steps: int = 2, **changes):
    model = build_model(family, **changes)
    updater = build_updater(build_stage(), model)
    for step in range(steps):
        update(model, updater, step)
    return model, updater


def update(model, updater, seed: int) -> None:
    updater.begin(1e-3)
    model(random_tokens(12, seed=seed)).logits.square().mean().backward()
    updater.finish(is_good=True)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def save(folder: Path, updater, step: int, **more) -> None:
    write_checkpoint(folder, updater.state_tensors(), {"step": step} | more, {"ledger.jsonl": b"{}\n"})


def load(folder: Path, updater) -> int:
    found = newest_checkpoint(folder)
    assert found is not None
    updater.load_state_tensors(found.tensors())
    return found.step


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_loaded_checkpoint_goes_on_bit_for_bit(family, tmp_path):
    model, updater = trained(family)
    save(tmp_path, updater, 2)
    fresh, fresh_updater = trained(family, steps=0, seed=1)

    assert load(tmp_path, fresh_updater) == 2

    update(model, updater, seed=9)
    update(fresh, fresh_updater, seed=9)
    wanted = weights(model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(fresh).items())


def test_without_moments_the_next_update_would_differ(tmp_path):
    """So the test above would notice moments that were not loaded."""
    model, updater = trained()
    save(tmp_path, updater, 2)
    fresh, fresh_updater = trained(steps=0, seed=1)
    moments = fresh_updater.optimizer_tensors()
    fresh_updater.load_state_tensors(newest_checkpoint(tmp_path).tensors() | moments)

    update(model, updater, seed=9)
    update(fresh, fresh_updater, seed=9)

    wanted = weights(model)
    assert any(not torch.equal(tensor, wanted[name]) for name, tensor in weights(fresh).items())


def test_facts_and_files_come_back(tmp_path):
    save(tmp_path, trained()[1], 2, guard={"losses": [0.1 + 0.2]})

    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.facts == {"step": 2, "guard": {"losses": [0.1 + 0.2]}}
    assert (found.folder / "ledger.jsonl").read_bytes() == b"{}\n"


def test_there_is_none_before_one_is_written(tmp_path):
    assert newest_checkpoint(tmp_path / "none") is None


def test_the_newest_is_loaded_and_old_ones_are_removed(tmp_path):
    updater = trained()[1]
    for step in (2, 4, 10, 999_999, 1_000_000):
        save(tmp_path, updater, step)

    assert [path.name for path in checkpoints(tmp_path)] == ["step-999999", "step-1000000"]
    assert len(checkpoints(tmp_path)) == KEEP
    assert newest_checkpoint(tmp_path).step == 1_000_000


def test_a_half_written_checkpoint_is_ignored_and_later_replaced(tmp_path):
    updater = trained()[1]
    save(tmp_path, updater, 2)
    torn = tmp_path / "step-000004.partial"
    torn.mkdir()
    (torn / STATE).write_bytes(b"half")

    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]
    assert newest_checkpoint(tmp_path).step == 2

    save(tmp_path, updater, 4)
    assert not torn.exists()
    assert newest_checkpoint(tmp_path).step == 4


# Damage


def flip(path: Path, at: float = 0.9) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 1
    path.write_bytes(content)


def tensor_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def of_old(folder: Path) -> None:
    """As it was before it had a state file."""
    (folder / STATE).unlink()


DAMAGE = {
    "cut short": (lambda folder: tensor_file(folder).write_bytes(tensor_file(folder).read_bytes()[:-10]), "size"),
    "one bit of a weight": (lambda folder: flip(tensor_file(folder)), "has changed"),
    "one bit of the state": (lambda folder: flip(folder / STATE, 0.5), "state.json"),
    "the state cut short": (lambda folder: (folder / STATE).write_text("{"), "state.json is missing or unreadable"),
    "an empty state": (lambda folder: (folder / STATE).write_text("[]"), "state.json is missing or unreadable"),
    "no state": (of_old, "state.json is missing"),
    "no tensors": (lambda folder: tensor_file(folder).unlink(), "missing"),
    "no ledger": (lambda folder: (folder / "ledger.jsonl").unlink(), "ledger.jsonl is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_it_used(kind, tmp_path, capsys):
    damage, said = DAMAGE[kind]
    updater = trained()[1]
    save(tmp_path, updater, 2)
    save(tmp_path, updater, 4)
    damage(tmp_path / "step-000004")

    found = newest_checkpoint(tmp_path)

    assert found is not None
    assert found.step == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("checkpoint step-000004 is damaged (")
    assert said in sentence


def test_without_checksums_a_changed_bit_would_pass(tmp_path, monkeypatch):
    """So the test above is about the checksums."""
    monkeypatch.setattr(checkpoint_module, "changed_file", partial(artifacts.changed_file, content=False))
    save(tmp_path, trained()[1], 4)
    flip(tensor_file(tmp_path / "step-000004"))
    assert newest_checkpoint(tmp_path).step == 4


def test_what_was_gone_back_from_is_removed_and_pushes_no_good_one_out(tmp_path):
    updater = trained()[1]
    save(tmp_path, updater, 2)
    for step in (4, 6):
        shutil.copytree(tmp_path / "step-000002", tmp_path / f"step-{step:06d}")
        (tmp_path / f"step-{step:06d}" / STATE).write_text("")

    save(tmp_path, updater, 3)

    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]


# Files


def test_nothing_in_a_checkpoint_can_run_code(tmp_path):
    """torch's own format of distributed checkpoints has a pickle in it."""
    save(tmp_path, trained()[1], 1)
    for path in (tmp_path / "step-000001").iterdir():
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())
        else:
            json.loads(path.read_text())


def test_tied_weights_are_saved_once(tmp_path):
    save(tmp_path, trained("llama-tied")[1], 1)

    assert not [name for name in newest_checkpoint(tmp_path).tensors() if name.startswith("lm_head")]


def test_many_tensors_go_to_several_files_and_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "FILE_BYTES", 20_000)
    model, updater = trained()
    save(tmp_path, updater, 1)
    fresh, fresh_updater = trained(steps=0, seed=1)

    load(tmp_path, fresh_updater)

    assert len(list((tmp_path / "step-000001").glob("*.safetensors"))) > 3
    wanted = weights(model)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(fresh).items())
