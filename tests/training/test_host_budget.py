"""A stage that needs more host memory than there is keeps less there, or is refused before any weight is loaded."""

import logging
from dataclasses import replace

import pytest
import torch

from factory import CPU, build_stage, random_row, save_folder, save_rows
from training.stage_runs import assert_same_result
from unspool.core.errors import ConfigError
from unspool.core.host_memory import HostMemory
from unspool.models.load import load_model
from unspool.models.memory.host_bytes import BLOCK_BYTES, LayerWidths
from unspool.training import host_budget
from unspool.training import stage as stage_module
from unspool.training.checkpoint import save
from unspool.training.checkpoint.save import Saver
from unspool.training.host_budget import HostNeeds, HostRoom, count_params, fit_stage, smallest_share, stage_needs
from unspool.training.stage import StageInputs, run_stage

GIB = 1 << 30
LLAMA_8B = LayerWidths(num_layers=32, num_heads=32, hidden=4096, queries=4096, keys=1024, inner=14336)
NOTHING = HostNeeds(loading=0, states=0)
ROOM = HostRoom(available=122 * GIB, total=128 * GIB, owner="this machine", ranks=1)
LONG = {"context_length": "512K", "batch_tokens": "512K", "tokens": "512K", "activation_checkpointing": "full"}
KEPT = {"context_length": "64K", "batch_tokens": "64K", "tokens": "64K", "activation_checkpointing": "keep-attention"}


def fit(room: HostRoom, needs: HostNeeds = NOTHING, **settings):
    stage = build_stage(**settings)
    return fit_stage(stage, LLAMA_8B, needs, room, tokens=stage.tokens_per_pass, on_cuda=True)


def test_what_fits_is_not_changed():
    stage, note = fit(ROOM, **LONG, offload=True, layers_per_checkpoint=2)
    assert stage.layers_per_checkpoint == 2 and note is None


def test_kept_results_are_reduced_and_a_sentence_says_so():
    half = replace(ROOM, available=64 * GIB, owner="this container")
    stage, note = fit(half, **KEPT, offload=True, keep_products=30, keep_on_host=15)
    assert (stage.keep_products, stage.keep_on_host) == (22, 7)
    assert note == (
        "stage one: activations take 95.2 GiB of host memory per rank, and this container has 64.0 GiB of 128.0 GiB "
        "available; continuing with keep_products 22 and keep_on_host 7 instead of 30 and 15 (52.7 GiB), which "
        "recomputes more"
    )


def test_checkpoints_that_do_not_fit_are_refused_with_settings_that_do():
    with pytest.raises(ConfigError, match=r"activations take 124\.0 GiB.*128\.0 GiB available; set") as refused:
        fit(ROOM, **LONG, offload=True)
    assert "set layers_per_checkpoint: 2 (60.0 GiB; needs more device memory)" in str(refused.value)
    fit(ROOM, **LONG, offload=True, layers_per_checkpoint=2)


def test_ranks_of_a_machine_share_its_memory():
    fit(ROOM, **KEPT, offload=True)
    with pytest.raises(ConfigError, match="available, shared by 8 ranks; set layers_per_checkpoint: 2"):
        fit(replace(ROOM, ranks=8), **KEPT, offload=True)


def test_the_smallest_share_of_any_machine_counts():
    large, small = ["a", 100 * GIB, 128 * GIB, "this machine"], ["b", 30 * GIB, 32 * GIB, "this container"]
    found = smallest_share([large, small, None, large, large, large])
    assert found == {"available": 100 * GIB, "total": 128 * GIB, "owner": "this machine", "ranks": 4}
    assert smallest_share([large, small])["owner"] == "this container"
    assert smallest_share([None, None]) is None


def test_a_model_that_every_rank_loads_in_full_is_refused():
    needs = stage_needs(build_stage(), 8_000_000_000, num_shards=8, loads_full=True, on_cuda=True)
    assert needs.states == 0, "they are on the devices"
    fit(ROOM, needs, **KEPT)
    with pytest.raises(ConfigError, match=r"loading the model takes 29\.8 GiB of host memory per rank.*8 ranks"):
        fit(replace(ROOM, ranks=8), needs, **KEPT)


def test_weights_in_host_memory_count():
    offloaded = build_stage(parallel={"offload": True})
    needs = stage_needs(offloaded, 1000, num_shards=8, loads_full=False, on_cuda=True)
    assert (needs.loading, needs.states) == (0, 16 * 1000 // 8)
    assert stage_needs(build_stage(), 1000, num_shards=1, loads_full=True, on_cuda=False).states == 16 * 1000


# Whole stages


@pytest.fixture(scope="module")
def materials(tmp_path_factory) -> StageInputs:
    folder = tmp_path_factory.mktemp("materials")
    rows = save_rows(folder / "rows", [random_row((32,), seed) for seed in range(6)])
    return StageInputs(model=str(save_folder(folder / "model")), datasets={"long": rows})


def give(monkeypatch, available: int) -> None:
    memory = HostMemory(total=available, available=available, container_limit=available)
    monkeypatch.setattr(host_budget, "measure_host_memory", lambda: memory)


def test_a_stage_with_too_little_host_memory_loads_nothing(materials, tmp_path, monkeypatch):
    give(monkeypatch, BLOCK_BYTES // 2)
    monkeypatch.setattr(stage_module, "load_model", lambda *_, **__: pytest.fail("loaded the model"))
    stage = build_stage(activation_checkpointing="full", offload=True)
    with pytest.raises(ConfigError, match=r"stage one: activations take .* this container has 0\.0 GiB of 0\.0 GiB"):
        run_stage(stage, materials, tmp_path / "out" / "one", seed=0, device=CPU)
    assert not (tmp_path / "out").exists()


def test_a_stage_that_keeps_less_has_the_same_result(materials, tmp_path, monkeypatch, caplog):
    settings = {"activation_checkpointing": "keep-attention", "keep_products": 2, "keep_on_host": 2}
    whole, less = tmp_path / "whole" / "one", tmp_path / "less" / "one"
    run_stage(build_stage(**settings), materials, whole, seed=0, device=CPU)
    give(monkeypatch, 10 * BLOCK_BYTES)  # a layer keeps eight tensors, each in a block of its own
    with caplog.at_level(logging.WARNING):
        run_stage(build_stage(**settings), materials, less, seed=0, device=CPU)
    assert "continuing with keep_products 1 and keep_on_host 1 instead of 2 and 2" in caplog.text
    assert_same_result(less, whole)


def test_parameters_are_counted_from_the_files(materials):
    model = load_model(str(materials.model), device=CPU, dtype=torch.float32)
    assert count_params(str(materials.model)) == sum(parameter.numel() for parameter in model.parameters())
    assert count_params("some/model-on-the-hub") == 0


def test_without_room_for_a_copy_checkpoints_are_written_while_training_waits(materials, tmp_path, monkeypatch, caplog):
    stage = build_stage(checkpoint_every=2)
    run_stage(stage, materials, tmp_path / "copied" / "one", seed=0, device=CPU)
    monkeypatch.setattr(Saver, "_copy", lambda *_: pytest.fail("copied the state"))
    measured = []

    def first_enough_then_little() -> HostMemory:
        measured.append(1)
        return HostMemory(total=GIB, available=GIB if len(measured) == 1 else 1000)

    monkeypatch.setattr(host_budget, "measure_host_memory", first_enough_then_little)
    written = []
    monkeypatch.setattr(save, "_prune", lambda folder, step: written.append(step))
    with caplog.at_level(logging.WARNING):
        run_stage(stage, materials, tmp_path / "direct" / "one", seed=0, device=CPU)
    assert caplog.text.count("checkpoints are written without a copy, and steps wait for them") == 1
    assert written == [2, 4]
    assert_same_result(tmp_path / "direct" / "one", tmp_path / "copied" / "one")


def test_a_checkpoint_without_a_copy_holds_the_state(tmp_path):
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.uint8)}
    with Saver(tmp_path, stage="one", pin=False, room=lambda: replace(ROOM, available=10)) as saver:
        saver.save(tensors, {"step": 7}, {"log": b"x"})
        saver.wait_for_copy()
        tensors["a"].zero_()  # as the next update would
    found = save.newest_checkpoint(tmp_path)
    assert found is not None and found.step == 7
    assert torch.equal(found.tensors()["a"], torch.arange(12.0).view(3, 4))
