"""FSDP2: shard a model over ranks, load weights straight into its shards, gather them again for export."""

from contextlib import ExitStack
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors import safe_open
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
from transformers import AutoModelForCausalLM

from unspool.core.errors import ConfigError
from unspool.models.attention.interface import NAME, register
from unspool.models.attention.padding import skip_masks
from unspool.models.checks import layers_of
from unspool.models.rotary import apply_head_bases, decide_by_document, head_bases, plain_config
from unspool.models.weight_files import weight_files
from unspool.training.parallel.dtensor import full_tensor, local_rows, local_shard
from unspool.training.parallel.mesh import weights_mesh
from unspool.training.step import METHOD, loss_pass


def apply_fsdp(model: Any, mesh: DeviceMesh, *, offload: bool = False, layers_together: int = 1) -> None:
    """Shard weights, gradients and optimizer state over ranks, in place. Layers are gathered only while they compute.

    A parameter's gradient is the *sum* over all ranks in fp32. The reason: each rank's loss is its part of the step's
    sum divided by the step's token count. On CUDA, layers compute in bf16, and shards keep the model's own precision.
    Layers of one activation checkpoint are gathered together. The head stays gathered throughout a step (with the
    embedding, where they are tied). Afterwards call `batch_loss` or the model itself, not its submodules.
    """
    on_cuda = mesh.device_type == "cuda"
    options: dict[str, Any] = {
        "mesh": weights_mesh(mesh),
        # Layers receive the output of earlier layers in its own precision.
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
        # The embedding's gradient does not need its weight.
        embedding.set_unshard_in_backward(False)
    fully_shard(model, **options)
    sum_gradients(model)
    setattr(model, METHOD, MethodType(loss_pass, model))
    register_fsdp_forward_method(model, METHOD)


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients instead of averaging them, with sum reductions only, because gloo has no other."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def unshard_model(model: Any, *, dtype: torch.dtype, is_leader: bool) -> Any:
    """Gather a sharded model for export. All ranks must call this; only the leader gets the model, others None."""
    weights = {}
    for name, parameter in model.named_parameters():
        value = full_tensor(parameter.detach()).to(dtype)
        if is_leader:
            weights[name] = value.cpu()
    if not is_leader:
        return None
    weights |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in model.state_dict()}
    plain = build_empty(plain_config(model.config), dtype=dtype)
    plain.load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    missing = [name for name, parameter in plain.named_parameters() if parameter.is_meta]
    assert not missing, f"{missing[0]} was not gathered"
    plain.generation_config = model.generation_config
    bases = head_bases(model)
    if bases is not None:
        apply_head_bases(plain, bases)
    return plain


# Loading


def build_empty(config: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """Build the model with our attention, in eval mode, on the meta device: without memory for its weights."""
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    decide_by_document(model)
    skip_masks(model)
    return model.eval()


@torch.no_grad()
def load_shards(model: Any, folder: Path, device: torch.device) -> None:
    """Read safetensors from `folder` into the shards of `model`, on `device`.

    The model comes from `build_empty` and `parallelize`; apply RoPE settings afterwards. A rank holds its shards and
    one shard in the file's precision. The weights equal those of plain loading, bit for bit.
    """
    model.to_empty(device=device)
    _fill_buffers(model, device)
    files = weight_files(folder)
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))}
        for name, parameter in model.named_parameters():
            stored = _stored_name(name, files, model, folder)
            piece = opened[files[stored]].get_slice(stored)
            if tuple(piece.get_shape()) != tuple(parameter.shape):
                raise ConfigError(
                    f"model {folder}: {name} has shape {tuple(piece.get_shape())} in its file, but "
                    f"{tuple(parameter.shape)} by its config; download it again."
                )
            local = local_shard(parameter)
            if local.numel():
                local.copy_(read_rows(piece, local_rows(parameter)))


def read_rows(piece: Any, rows: slice) -> Tensor:
    """Read some rows of a tensor from its file, without reading the other rows."""
    found: Tensor = piece[rows]
    return found


def sharded_load_problem(config: Any, folder: Path) -> str | None:
    """Return why the weights in `folder` cannot be read shard by shard; None if they can."""
    model = build_empty(config)
    try:
        _refuse_other_buffers(model)
        files = weight_files(folder)
        for name, _ in model.named_parameters():
            _stored_name(name, files, model, folder)
    except ConfigError as error:
        return str(error)
    return None


def _stored_name(name: str, files: dict[str, Path], model: Any, folder: Path) -> str:
    """Return the name of a parameter in the files, which may use either name of tied weights."""
    if name in files:
        return name
    parameter = model.get_parameter(name)
    same: list[str] = [other for other, found in model.named_parameters(remove_duplicate=False) if found is parameter]
    for other in same:
        if other in files:
            return other
    raise ConfigError(
        f"model {folder}: its files have no {name}, so its weights cannot be read shard by shard; export it with plain "
        "transformers first, or train it on one device."
    )


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Compute the RoPE tables, which files do not store. Other buffers are refused, because they would stay empty."""
    _refuse_other_buffers(model)
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(model.config).to(device)


def _refuse_other_buffers(model: Any) -> None:
    others = [name for name, _ in model.named_buffers() if not name.rpartition(".")[0].endswith("rotary_emb")]
    if others:
        raise ConfigError(
            f"{type(model).__name__} has buffers besides its weights ({others[0]}), which cannot be computed without "
            "loading the full model; train it on one device."
        )
