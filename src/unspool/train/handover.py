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

from unspool.train.divided import own_part
from unspool.train.fsdp import whole
from unspool.train.optimizer import Updater
from unspool.train.shards import own_rows

OPTIMIZER = "optimizer.safetensors"


def save_handover(path: Path | None, updater: Updater, *, exported: torch.dtype) -> None:
    """Without a `path`, for a rank that only gives its parts of what another one writes."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        if path is not None:
            kept[name] = tensor.detach().cpu().contiguous()

    for name, weight in updater.named_masters():
        value = whole(weight.detach())
        if not torch.equal(value.to(exported).to(value.dtype), value):
            keep(f"{name}/weight", value)
    for name, moment in updater.moment_tensors().items():
        keep(name, whole(moment))
    if path is not None:
        save_file(kept, path)


@torch.no_grad()
def load_trained_weights(model: Any, saved: Mapping[str, Tensor]) -> None:
    """Before an updater takes the weights over; rows added to an embedding since then stay as they are."""
    for name, parameter in model.named_parameters():
        weight = saved.get(f"{name}/weight")
        if weight is not None:
            part, own = own_part(parameter), weight[own_rows(parameter)]
            part[: own.shape[0]] = own.to(part.device, part.dtype)
