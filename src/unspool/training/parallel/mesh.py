"""The ranks of a run as a grid with named axes, and which of them do what together.

In: `ParallelConfig`, the number of ranks. Out: a `DeviceMesh` over (replicate, shard, ring, ulysses).
- Ranks that differ in ring or ulysses share a row; neighbours do so first, since they exchange most.
- Ranks that differ in replicate or shard train on different rows.
- Ranks that differ in anything but replicate hold different parts of the weights.
Promise: groups are torch's own; rows and results depend on the sizes of axes, never on which host a rank is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unspool.training.parallel.config import ParallelConfig, settle_layout
from unspool.training.parallel.ranks import Ranks

AXES = ("replicate", "shard", "ring", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank stands: which rows of a step are its, and which part of each row."""

    data_rank: int
    data_ranks: int
    sequence_rank: int
    sequence_ranks: int
    ring: int  # how many of them pass keys on; the others exchange heads


# The place of a rank that has no other beside it.
ALONE = Place(data_rank=0, data_ranks=1, sequence_rank=0, sequence_ranks=1, ring=1)


def build_mesh(config: ParallelConfig, world_size: int, device_type: str) -> DeviceMesh:
    layout = settle_layout(config, world_size)
    sizes = (layout.replicate, layout.shard, layout.ring, layout.ulysses)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as FSDP sees them: (replicate, weights), or weights alone where there is one copy of them."""
    replicate = mesh["replicate"].size()
    if replicate == 1:
        return DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=("weights",))
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(replicate, -1), mesh_dim_names=("replicate", "weights"))


def place_of(mesh: DeviceMesh) -> Place:
    """This rank's place."""
    sizes = dict(zip(AXES, mesh.mesh.shape, strict=True))
    ranks = {axis: mesh.get_local_rank(axis) for axis in AXES}
    return Place(
        data_rank=ranks["replicate"] * sizes["shard"] + ranks["shard"],
        data_ranks=sizes["replicate"] * sizes["shard"],
        sequence_rank=ranks["ring"] * sizes["ulysses"] + ranks["ulysses"],
        sequence_ranks=sizes["ring"] * sizes["ulysses"],
        ring=sizes["ring"],
    )


def group_of(mesh: DeviceMesh, axis: str) -> Any:
    """The process group of this rank along `axis`; None where it is alone."""
    return mesh.get_group(axis) if mesh[axis].size() > 1 else None


def over_gloo(tensor: Tensor, group: Any) -> bool:
    """Whether it is gloo that would carry this tensor of a GPU, as where ranks share one: it does not do all of it."""
    return bool(tensor.is_cuda and group._get_backend(tensor.device).name() == "gloo")


def sum_over_ranks(values: Sequence[float], mesh: DeviceMesh) -> list[float]:
    """Sums over all ranks, in float64: counts of tokens and sums of losses, each rank having its own part."""
    if mesh.size() == 1:
        return [float(value) for value in values]
    assert mesh.size() == dist.get_world_size(), "the mesh holds all ranks"
    total = torch.tensor(list(values), dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


# The ranks that train one stage: what they do together, and what only the first of them does.


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
