"""The ranks that train one stage: what they do together, and what only the first of them does.

In: the ranks of the job (ranks.py), the stage's `parallel`. Out: a `Team`; of one rank it does nothing of its own.
Promise: all ranks go by the same numbers, so that they never decide otherwise about a step.
Price: a wait for the leader has no limit of its own: it may write for hours; a rank that dies ends all (ranks.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from unspool.train.mesh import ALONE, Place, build_mesh, place_of, sum_over_ranks
from unspool.train.parallel_config import ParallelConfig, settle_layout
from unspool.train.ranks import Ranks

T = TypeVar("T")
# Every meeting of a job has a name of its own; ranks come to them in the same order.
_NUMBERS = count()


@dataclass(frozen=True)
class Team:
    ranks: Ranks
    mesh: DeviceMesh | None  # None: one rank

    @property
    def is_leader(self) -> bool:
        return self.ranks.is_leader

    @property
    def place(self) -> Place:
        return ALONE if self.mesh is None else place_of(self.mesh)

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, each having its own part."""
        return [float(value) for value in values] if self.mesh is None else sum_over_ranks(values, self.mesh)

    def from_leader(self, make: Callable[[], T]) -> T:
        """What the leader makes, for all: anything that JSON can hold. The others wait."""
        return from_leader(self.ranks, make)

    def meet(self) -> None:
        """Wait until all are here."""
        if self.mesh is not None:
            self.ranks.barrier(f"meeting {next(_NUMBERS)}")


def from_leader(ranks: Ranks, make: Callable[[], T]) -> T:
    if ranks.world_size == 1:
        return make()
    made = make() if ranks.is_leader else None
    found: T = ranks.broadcast(f"made {next(_NUMBERS)}", made)
    return found


def one_rank(device: torch.device) -> Ranks:
    return Ranks(rank=0, world_size=1, local_rank=0, device=device)


def build_team(config: ParallelConfig, ranks: Ranks) -> Team:
    """Refuses a `parallel` that does not fit the number of ranks."""
    settle_layout(config, ranks.world_size)
    mesh: Any = build_mesh(config, ranks.world_size, ranks.device.type) if ranks.world_size > 1 else None
    return Team(ranks, mesh)
