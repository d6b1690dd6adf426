"""Tensors of which every rank keeps a part.

In: a model or its tensors, divided among ranks (fsdp.py) or not. Out: this rank's part; a part as one of the whole.
Promise: nothing here sends anything; what is not divided is left as it is.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def is_divided(model: Any) -> bool:
    return isinstance(next(model.parameters()), DTensor)


def part_again(model: Any) -> None:
    """After a pass without a backward pass: what FSDP then leaves whole (the head) is no part, and is not kept."""
    if isinstance(model, FSDPModule):
        model.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """The memory of this rank's part, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def as_part(part: Tensor, like: Tensor) -> Tensor:
    """`part` as this rank's part of a tensor that is divided as `like` is, on whatever device it lies."""
    if not isinstance(like, DTensor):
        return part
    # By its constructor: `from_local` would move what waits in host memory to the mesh's device.
    return DTensor(part, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def computing_device(model: Any) -> torch.device:
    """Where a model computes, also while its weights wait in host memory."""
    weight = next(model.parameters())
    if not isinstance(weight, DTensor):
        device: torch.device = weight.device
        return device
    kind = weight.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
