"""The ranks of a run as a mesh with named axes, and operations over ranks.

The mesh has the axes (replicate, shard, ring, ulysses). Ranks that differ in ring or ulysses share a row; these are
neighbors, because they exchange most. Ranks that differ in replicate or shard train on different rows. Ranks that
differ in any axis but replicate hold different shards of the weights.
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
class RankCoords:
    """The rows of a step that belong to one rank, and its part of each row."""

    data_rank: int
    data_ranks: int
    sequence_rank: int
    sequence_ranks: int
    ring: int  # sequence ranks of the ring; the others exchange heads (Ulysses)


SINGLE_RANK = RankCoords(data_rank=0, data_ranks=1, sequence_rank=0, sequence_ranks=1, ring=1)


def build_mesh(config: ParallelConfig, world_size: int, device_type: str) -> DeviceMesh:
    layout = settle_layout(config, world_size)
    sizes = (layout.replicate, layout.shard, layout.ring, layout.ulysses)
    return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)


def weights_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP: (replicate, weights), or only weights if there is one replica."""
    replicate = mesh["replicate"].size()
    if replicate == 1:
        return DeviceMesh(mesh.device_type, mesh.mesh.flatten(), mesh_dim_names=("weights",))
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(replicate, -1), mesh_dim_names=("replicate", "weights"))


def rank_coords(mesh: DeviceMesh) -> RankCoords:
    """Return this rank's coordinates."""
    sizes = dict(zip(AXES, mesh.mesh.shape, strict=True))
    ranks = {axis: mesh.get_local_rank(axis) for axis in AXES}
    return RankCoords(
        data_rank=ranks["replicate"] * sizes["shard"] + ranks["shard"],
        data_ranks=sizes["replicate"] * sizes["shard"],
        sequence_rank=ranks["ring"] * sizes["ulysses"] + ranks["ulysses"],
        sequence_ranks=sizes["ring"] * sizes["ulysses"],
        ring=sizes["ring"],
    )


def group_of(mesh: DeviceMesh, axis: str) -> Any:
    """Return the process group of this rank along `axis`; None if it is the only rank there."""
    return mesh.get_group(axis) if mesh[axis].size() > 1 else None


def is_gloo_on_gpu(tensor: Tensor, group: Any) -> bool:
    """Return whether gloo would send this GPU tensor (if ranks share a GPU). gloo supports only some collectives."""
    return bool(tensor.is_cuda and group._get_backend(tensor.device).name() == "gloo")


def sum_over_ranks(values: Sequence[float], mesh: DeviceMesh) -> list[float]:
    """Return sums over all ranks in float64, for token counts and losses."""
    if mesh.size() == 1:
        return [float(value) for value in values]
    assert mesh.size() == dist.get_world_size(), "the mesh holds all ranks"
    total = torch.tensor(list(values), dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def max_over_ranks(value: int, mesh: DeviceMesh) -> int:
    """Return the largest value of all ranks."""
    found = torch.tensor(value, dtype=torch.int64, device=mesh.device_type)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


T = TypeVar("T")
# Every barrier and broadcast of a job has its own name; ranks reach them in the same order.
_NUMBERS = count()


@dataclass(frozen=True)
class DistContext:
    """The ranks that train one stage together."""

    ranks: Ranks
    mesh: DeviceMesh | None  # None: one rank

    @property
    def is_leader(self) -> bool:
        return self.ranks.is_leader

    @property
    def coords(self) -> RankCoords:
        return SINGLE_RANK if self.mesh is None else rank_coords(self.mesh)

    def from_leader(self, make: Callable[[], T]) -> T:
        return from_leader(self.ranks, make)

    def barrier(self) -> None:
        if self.mesh is not None:
            self.ranks.barrier(f"barrier {next(_NUMBERS)}")


def from_leader(ranks: Ranks, make: Callable[[], T]) -> T:
    """Call `make` on the leader and broadcast its JSON-compatible result. The other ranks wait."""
    if ranks.world_size == 1:
        return make()
    made = make() if ranks.is_leader else None
    found: T = ranks.broadcast(f"made {next(_NUMBERS)}", made)
    return found


def gather_on_leader(ranks: Ranks, value: T) -> list[T]:
    """Return the JSON-compatible values of all ranks on the leader; an empty list on other ranks."""
    return ranks.gather(f"gathered {next(_NUMBERS)}", value)


def single_rank(device: torch.device) -> Ranks:
    return Ranks(rank=0, world_size=1, local_rank=0, device=device)


def build_dist_context(config: ParallelConfig, ranks: Ranks) -> DistContext:
    """Build the context of this rank; ConfigError if `parallel` does not fit the number of ranks."""
    settle_layout(config, ranks.world_size)
    mesh: Any = build_mesh(config, ranks.world_size, ranks.device.type) if ranks.world_size > 1 else None
    return DistContext(ranks, mesh)
