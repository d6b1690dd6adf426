"""The ranks of a run as a grid with named axes, and which of them do what together.

In: `ParallelConfig`, the number of ranks. Out: a `DeviceMesh` over (replicate, shard, ring, ulysses).
- Ranks that differ in ring or ulysses share a row; neighbours do so first, since they exchange most.
- Ranks that differ in replicate or shard train on different rows.
- Ranks that differ in anything but replicate hold different parts of the weights.
Promise: groups are torch's own; rows and results depend on the sizes of axes, never on which host a rank is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unspool.train.parallel_config import ParallelConfig, settle_layout

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
