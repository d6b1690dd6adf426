"""Weights, gradients and moments divided among ranks (FSDP2); a layer is whole only while it computes.

In: a model, on a device or on none yet (meta), and the mesh. Out: the same model, its parameters `DTensor`s.
Promise: a parameter's gradient is the *sum* over all ranks, since each rank's loss is its part of the step's
sum divided by the step's count; sums are fp32. On CUDA layers compute in bf16, as they do on one device, while the
parts that ranks keep are in the model's own precision. Layers that share a checkpoint are gathered together.
Price: the head is whole throughout a step (with the embedding, where they are one tensor).
Elsewhere: loading (shards.py), order among the other settings (parallelize.py).
"""

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from unspool.models.checks import layers_of
from unspool.models.rotary import apply_head_bases, head_bases
from unspool.training.parallel.mesh import over_gloo, weights_mesh
from unspool.training.parallel.sharded_load import build_empty
from unspool.training.step import METHOD, loss_pass


def apply_fsdp(model: Any, mesh: DeviceMesh, *, offload: bool = False, layers_together: int = 1) -> None:
    """Change `model` in place; after this `batch_loss` and the model itself can be called, its parts cannot."""
    on_cuda = mesh.device_type == "cuda"
    options: dict[str, Any] = {
        "mesh": weights_mesh(mesh),
        # What layers are given is what the layers before have made, in the precision that they computed it in.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if on_cuda else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_cuda) if offload else OffloadPolicy(),
    }
    layers = layers_of(model)
    for start in range(0, len(layers), layers_together):
        group = layers[start : start + layers_together]
        fully_shard(group if len(group) > 1 else group[0], **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        fully_shard(embedding, **options)
        # Its gradient needs no weight.
        embedding.set_unshard_in_backward(False)
    fully_shard(model, **options)
    sum_gradients(model)
    setattr(model, METHOD, MethodType(loss_pass, model))
    register_fsdp_forward_method(model, METHOD)


def sum_gradients(model: nn.Module) -> None:
    """Sums instead of FSDP's means; and by sums alone, since gloo knows no other reduction."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, which all must call this; one that is not divided stays as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    # The way gloo gathers here would read a GPU's memory as if it were the host's, and end the process.
    by_host = over_gloo(tensor, tensor.device_mesh.get_group(0))
    parts = cast(DTensor, tensor.cpu()) if by_host else tensor
    return parts.full_tensor().to(tensor.device)


# A model that ranks have divided among them, put together again to be written.


@torch.no_grad()
def gathered(model: Any, *, dtype: torch.dtype, is_leader: bool) -> Any:
    """All ranks must call this; those that are not the leader get None."""
    weights = {}
    for name, parameter in model.named_parameters():
        value = whole(parameter.detach()).to(dtype)
        if is_leader:
            weights[name] = value.cpu()
    if not is_leader:
        return None
    weights |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in model.state_dict()}
    plain = build_empty(model.config, dtype=dtype)
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    left = [name for name, parameter in plain.named_parameters() if parameter.is_meta]
    assert not left, f"{left[0]} was not put together"
    plain.generation_config = model.generation_config
    bases = head_bases(model)
    if bases is not None:
        apply_head_bases(plain, bases)
    return plain
