"""Functions for tensors that ranks shard (`DTensor`) and for plain tensors."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Shard

from unspool.training.parallel.mesh import is_gloo_on_gpu


def is_sharded(model: Any) -> bool:
    return isinstance(next(model.parameters()), DTensor)


def reshard(model: Any) -> None:
    """Free the weights that FSDP leaves gathered (the head) after a forward pass without a backward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def local_shard(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's shard, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def rows_per_rank(parameter: Tensor) -> int:
    """Return the rows of a parameter per rank (the last ranks have fewer); all rows if it is not sharded."""
    rows = len(parameter)
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                assert placement.dim == 0, "weights are sharded by rows"
                rows = -(-len(parameter) // parameter.device_mesh.size(axis))
    return rows


def local_rows(parameter: Tensor) -> slice:
    """Return the rows of a parameter that this rank holds: equally many per rank except the last ones, as in torch."""
    rows, size = slice(0, len(parameter)), rows_per_rank(parameter)
    if not isinstance(parameter, DTensor):
        return rows
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            start = parameter.device_mesh.get_local_rank(axis) * size
            rows = slice(min(start, len(parameter)), min(start + size, len(parameter)))
    assert rows.stop - rows.start == parameter.to_local().shape[0], "torch shards differently"
    return rows


def as_shard_of(shard: Tensor, like: Tensor | None, *, num_rows: int | None = None) -> Tensor:
    """Return `shard` as this rank's shard of a tensor with `num_rows` rows, sharded like `like`, on any device."""
    if not isinstance(like, DTensor):
        return shard
    rows = len(like) if num_rows is None else num_rows
    shape = torch.Size((rows, *shard.shape[1:]))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), shard.dtype)
    # Use the constructor: `from_local` would move a shard in host memory to the mesh's device.
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from all ranks, which must all call this; a plain tensor is returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    # gloo's gather would read GPU memory as host memory, and crash the process.
    by_host = is_gloo_on_gpu(tensor, tensor.device_mesh.get_group(0))
    shards = cast(DTensor, tensor.cpu()) if by_host else tensor
    return shards.full_tensor().to(tensor.device)


def compute_device(model: Any) -> torch.device:
    """Return the device that a model computes on, also if its weights are offloaded to host memory."""
    weight = next(model.parameters())
    if not isinstance(weight, DTensor):
        device: torch.device = weight.device
        return device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
