"""Using a model in the middle of its training, and leaving it as if nobody had.

Promise: weights, gradients, random numbers, train or eval mode, positions that a model computes anew as texts get
longer, and compiled code are afterwards what they were; a run that looks ends with the bits of one that does not.
Price: nothing is fused while looking: shapes that training never has would make its compiled code more general.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unspool.train.divided import computing_device, is_divided, part_again


@contextmanager
def looking_at(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients, in the precision of training."""
    device = computing_device(model)
    # Layers that are gathered from ranks come in the precision that they compute in.
    in_fp32 = next(model.parameters()).dtype == torch.float32 and not is_divided(model)
    modes = [(part, part.training) for part in model.modules()]
    kept = [(part, _state(part)) for part in model.modules() if next(part.buffers(recurse=False), None) is not None]
    is_cuda = device.type == "cuda"
    with (
        torch.no_grad(),
        torch.random.fork_rng([device] if is_cuda else []),
        torch.compiler.set_stance("force_eager"),
        # As in training, for weights in fp32; without its cache, where a later pass would find weights that were cast
        # without gradients.
        torch.autocast(device.type, torch.bfloat16, enabled=is_cuda and in_fp32, cache_enabled=False),
    ):
        model.eval()
        try:
            yield
        finally:
            for part, state in kept:
                _restore(part, state)
            for part, mode in modes:
                part.training = mode
            part_again(model)


def _state(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plain attributes and buffers; rotary modules replace theirs when they meet a text of another length."""
    plain = {name: value for name, value in vars(part).items() if not name.startswith("_")}
    return plain, {name: (buffer, buffer.clone()) for name, buffer in part.named_buffers(recurse=False)}


def _restore(part: nn.Module, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    plain, buffers = state
    vars(part).update(plain)
    for name, (buffer, content) in buffers.items():
        part._buffers[name] = buffer.copy_(content)
