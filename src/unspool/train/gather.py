"""A model that ranks have divided among them, put together again to be written.

In: a divided model, on all ranks. Out: on the leader a plain model of the same class, config and names, in host memory.
Promise: it is written by the same code as one that was never divided.
Price: the leader's host memory holds the whole model in the precision of the export.
"""

from typing import Any

import torch

from unspool.model.rotary import apply_head_bases, head_bases
from unspool.train.fsdp import whole
from unspool.train.shards import build_empty


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
