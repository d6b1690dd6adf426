"""The loss of one batch: the pass that a step differentiates.

In: a model, a `Batch`. Out: the sum of its tokens' losses, differentiable, and every token's loss.
The head's weight is read without calling the head, so where weights are gathered when a module is called, the whole
pass has to be that call: `apply_fsdp` makes it a method of the model, under the name METHOD.
"""

from typing import Any

import torch
from torch import Tensor

from unspool.model.head import read_head
from unspool.model.loss import summed_loss
from unspool.train.batch import Batch

METHOD = "loss_pass"


def batch_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """As `loss_pass`, by whatever way this model wants to be called."""
    method = getattr(model, METHOD, None)
    found: tuple[Tensor, Tensor] = loss_pass(model, batch) if method is None else method(batch)
    return found


def loss_pass(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    device, head = batch.tokens.device, read_head(model)
    # Only for weights in fp32: autocast computes norms and the like in fp32, also where all is bf16 already.
    by_autocast = device.type == "cuda" and head.weight.dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16, enabled=by_autocast):
        hidden = model.base_model(**batch.model_inputs, use_cache=False).last_hidden_state[0]
        if device.type == "cuda":
            hidden = hidden.to(torch.bfloat16)
        return summed_loss(hidden, head, batch.labels, num_valid=sum(batch.num_valid))
