"""Tensors that ranks shard among them (`DTensor`), and plain ones, through the same functions."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from unspool.training.parallel.mesh import is_gloo_on_gpu


def is_sharded(model: Any) -> bool:
    return isinstance(next(model.parameters()), DTensor)


def reshard(model: Any) -> None:
    """Free what FSDP leaves gathered (the head) after a forward pass without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local_shard(tensor: Tensor) -> Tensor:
    """The memory of this rank's shard, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def local_rows(parameter: Tensor) -> slice:
    """Rows of a parameter that this rank holds: equally many on each rank but the last ones, as torch shards."""
    rows = slice(0, len(parameter))
    if not isinstance(parameter, DTensor):
        return rows
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "weights are sharded by rows"
            size = -(-len(parameter) // parameter.device_mesh.size(axis))
            start = parameter.device_mesh.get_local_rank(axis) * size
            rows = slice(min(start, len(parameter)), min(start + size, len(parameter)))
    assert rows.stop - rows.start == parameter.to_local().shape[0], "torch shards in another way"
    return rows


def as_shard_of(shard: Tensor, like: Tensor | None) -> Tensor:
    """`shard` as this rank's shard of a tensor that is sharded as `like` is, on whatever device it is."""
    if not isinstance(like, DTensor):
        return shard
    # By its constructor: `from_local` would move a shard in host memory to the mesh's device.
    return DTensor(shard, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def full_tensor(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, which all must call this; a plain tensor is returned as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # gloo's gather would read GPU memory as if it were the host's, and end the process.
    by_host = is_gloo_on_gpu(tensor, tensor.device_mesh.get_group(0))
    shards = cast(DTensor, tensor.cpu()) if by_host else tensor
    return shards.full_tensor().to(tensor.device)


def compute_device(model: Any) -> torch.device:
    """The device that a model computes on, also while its weights are offloaded to host memory."""
    weight = next(model.parameters())
    if not isinstance(weight, DTensor):
        device: torch.device = weight.device
        return device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
