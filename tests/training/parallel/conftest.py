"""One start of 2 ranks and one of 4 for all tests of a file, which may run in a process of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from unspool.training.stage import StageInputs

from .jobs import jobs
from .ranks import run_ranks
from .stages import goes_on, make_materials, stage_jobs, train


def asked_for(module: str, job: str) -> bool:
    """Whether the tests of a file look at what a job finds."""
    in_steps = job.startswith("steps: ") or job == "refusals"
    in_groups = job in ("places", "slices", "sinks") or job.startswith("load ")
    files = {"test_steps": in_steps, "test_groups_and_loading": in_groups}
    return files.get(module.rpartition(".")[2], not in_steps and not in_groups)


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory) -> dict[int, dict[str, Any]]:
    """By number of ranks: what rank 0 found."""
    found = {}
    module = request.module.__name__
    for world in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks-{world}")

        def work(rank: int, world: int = world, folder=folder) -> None:
            results = {name: job() for name, job in jobs(world, folder).items() if asked_for(module, name)}
            if rank == 0:
                torch.save(results, folder / "results")

        run_ranks(work, world_size=world, store=folder / "store")
        found[world] = torch.load(folder / "results", weights_only=False)
    return found


@pytest.fixture(scope="session")
def stage_materials(tmp_path_factory) -> StageInputs:
    return make_materials(tmp_path_factory.mktemp("stage-materials"))


@pytest.fixture(scope="session")
def stages(stage_materials, tmp_path_factory) -> Path:
    """What 4 ranks, then 2 and then 1 have made of the same stage, in a folder each, and in `results-4` and
    `results-2` what rank 0 was told: see stages.py."""
    folder = tmp_path_factory.mktemp("stages")
    train(stage_materials, folder / "whole-1" / "one", {})
    for world in (4, 2):
        goes_on(stage_materials, folder)  # before there are several to write it

        def work(rank: int, world: int = world) -> None:
            results = {name: job() for name, job in stage_jobs(world, folder, stage_materials).items()}
            if rank == 0:
                torch.save(results, folder / f"results-{world}")

        run_ranks(work, world_size=world, store=folder / f"store-{world}")
    return folder
