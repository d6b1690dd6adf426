"""What a finished stage leaves for one that goes on from it: moments, and weights that its export has rounded.

In: an updater, the precision of the export. Out: `optimizer.safetensors`.
Promise: a stage that starts from another goes on from the weights that were trained, not from rounded ones.
Price: on disk, twice the fp32 weights for AdamW's moments, and once more on a GPU, where the export is bf16
(an 8B model: 60 GiB and 30 GiB). Only a stage that goes on from this one reads it; after the last it may be deleted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unspool.train.optimizer import Updater

OPTIMIZER = "optimizer.safetensors"


def save_handover(path: Path, updater: Updater, *, exported: torch.dtype) -> None:
    weights = {
        f"{name}/weight": weight
        for name, weight in updater.named_masters()
        if not torch.equal(weight.to(exported).to(weight.dtype), weight)
    }
    tensors = weights | updater.moment_tensors()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


@torch.no_grad()
def load_trained_weights(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Before an updater takes the weights over; rows added to an embedding since then stay as they are."""
    for name, parameter in model.named_parameters():
        weight = saved.get(f"{name}/weight")
        if weight is not None:
            parameter[: weight.shape[0]] = weight.to(parameter.device, parameter.dtype)
