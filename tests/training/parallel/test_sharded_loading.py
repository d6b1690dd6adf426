"""No rank has the full model on its device: memory settings and compiling work on weights that are read by shards."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from factory import build_model, build_stage
from unspool.models import fuse
from unspool.models.memory.policy import MemoryPolicy
from unspool.training import stage as stage_module
from unspool.training.checkpoint.resume import OPTIMIZER
from unspool.training.loader import LEDGER
from unspool.training.parallel.apply import needs_full_weights, parallelize
from unspool.training.parallel.config import ParallelConfig
from unspool.training.parallel.fsdp import build_empty
from unspool.training.parallel.mesh import build_dist_context, build_mesh
from unspool.training.stage import StageInputs

from .ranks import run_ranks
from .stages import SETTINGS, SHARD, _ranks, train

SHORT: dict[str, Any] = {"tokens": 2 * 128, "validation": None}
KEEP: dict[str, Any] = {"activation_checkpointing": "keep-attention"}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": KEEP | {"offload": True},
    "keep_on_host": KEEP | {"keep_products": 2, "keep_on_host": 1},
    "mlp_tiles": {"mlp_tiles": 8},
    "compile": {"compile": True},
    "all": KEEP | {"offload": True, "compile": True, "mlp_tiles": 8, "layers_per_checkpoint": 2},
}
ROUNDED = ("mlp_tiles", "all")


def compiled_by_nothing() -> None:
    """In a forked rank: what is compiled runs as it is."""
    fuse.torch.compile = lambda function: function


def loaded_on(materials: StageInputs, changes: dict[str, Any]) -> list[str]:
    """The devices on which a rank has the full model, if no weights can be read by shards."""
    devices: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(stage_module, "load_sharded", lambda *args, **kwargs: None)
    load = stage_module.load_model

    def recorded(ref: str, *, device: torch.device, dtype: torch.dtype) -> Any:
        devices.append(device.type)
        return load(ref, device=device, dtype=dtype)

    patch.setattr(stage_module, "load_model", recorded)
    stage = build_stage(**SETTINGS | SHORT | changes)
    context = build_dist_context(stage.parallel, _ranks())
    try:
        # A device that is not the one of the weights.
        device = torch.device("meta")
        stage_module._build(stage, materials, {}, seed=0, device=device, dist_context=context)
    finally:
        patch.undo()
    return devices


def sharded_before_weights() -> list[str]:
    """The devices of a model's parameters after it was set up without weights."""
    policy = MemoryPolicy(activation_checkpointing="full", offload=True, mlp_tiles=4)
    mesh = build_mesh(ParallelConfig(), 2, "cpu")
    model = parallelize(build_empty(build_model().config), mesh, ParallelConfig(), memory=policy, fuse=True)
    return sorted({parameter.device.type for parameter in model.parameters()})


@pytest.fixture(scope="module")
def made(stage_materials, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")

    def work(rank: int) -> None:
        compiled_by_nothing()
        jobs: dict[str, Callable[[], Any]] = {"set up": sharded_before_weights}
        for name, changes in CHANGES.items():
            for how in ("shards", "whole"):
                out = folder / f"{how}-{name}" / "one"
                jobs[f"{how} {name}"] = partial(
                    train, stage_materials, out, SHARD, whole=how == "whole", **SHORT | changes
                )
            jobs[f"device {name}"] = partial(loaded_on, stage_materials, changes)
        results = {name: job() for name, job in jobs.items()}
        if rank == 0:
            torch.save(results, folder / "results")

    run_ranks(work, world_size=2, store=folder / "store")
    return folder


def contents(made: Path, name: str) -> list[bytes]:
    return [(made / name / "one" / file).read_bytes() for file in ("model/model.safetensors", OPTIMIZER, LEDGER)]


@pytest.mark.parametrize("name", CHANGES)
def test_weights_read_by_shards_train_to_the_same_bits_as_a_model_loaded_whole(made, name):
    assert contents(made, f"shards-{name}") == contents(made, f"whole-{name}")


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in (*ROUNDED, "plain")])
def test_settings_that_only_move_tensors_change_no_bit(made, name):
    assert contents(made, f"shards-{name}") == contents(made, "shards-plain")


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_must_be_loaded_whole_stays_on_the_cpu_until_it_is_sharded(made, name):
    assert torch.load(made / "results", weights_only=False)[f"device {name}"] == ["cpu"]


def test_a_model_is_set_up_without_any_weight(made):
    assert torch.load(made / "results", weights_only=False)["set up"] == ["meta"]


@pytest.mark.parametrize("name", CHANGES)
def test_no_setting_of_memory_needs_full_weights(name):
    assert not needs_full_weights(build_stage(**SETTINGS | CHANGES[name]), {})
    assert needs_full_weights(build_stage(**SETTINGS | CHANGES[name], parallel={"offload": True}), {})
