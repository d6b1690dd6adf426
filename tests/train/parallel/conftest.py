"""One start of 2 ranks and one of 4 for all tests."""

from typing import Any

import pytest
import torch

from .jobs import jobs
from .ranks import run_ranks


@pytest.fixture(scope="session")
def answers(tmp_path_factory) -> dict[int, dict[str, Any]]:
    """By number of ranks: what rank 0 found."""
    found = {}
    for world in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks-{world}")

        def work(rank: int, world: int = world, folder=folder) -> None:
            results = {name: job() for name, job in jobs(world, folder).items()}
            if rank == 0:
                torch.save(results, folder / "results")

        run_ranks(work, world_size=world, store=folder / "store")
        found[world] = torch.load(folder / "results", weights_only=False)
    return found
