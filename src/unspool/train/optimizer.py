"""What a step's gradient does to the weights: clipping, then AdamW.

In: a model whose `.grad`s hold the step's gradient. Out: changed weights, and the gradient's norm.
Promise: a gradient that is not finite changes nothing.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from unspool.base.errors import ConfigError
from unspool.train.config import StageConfig


class Updater:
    """One optimizer step: `begin`, then the backward passes, then `finish`."""

    def __init__(self, model: Any, optimizer: Optimizer, *, clip: float) -> None:
        self.model, self.optimizer, self._clip = model, optimizer, clip

    def begin(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["share"]

    def finish(self, *, is_good: bool) -> float:
        """Update the weights, unless the loss was bad or the gradient is not finite; the norm before clipping."""
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip))
        if is_good and math.isfinite(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm


def build_updater(stage: StageConfig, model: Any) -> Updater:
    """AdamW; norms and biases are not decayed, and what `lr_for` sets to 0 is not trained at all.

    A group's `share` is of the stage's learning rate, so that one schedule serves all.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in stage.lr_for:
        if not any(part in name for name in names):
            raise ConfigError(
                f"stage {stage.name}: lr_for has {part!r}, which is in no parameter's name; they read {names[1]} …"
            )
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        lr = next((lr for part, lr in stage.lr_for.items() if part in name), stage.lr)
        parameter.requires_grad_(lr > 0)
        if lr > 0:
            groups[lr / stage.lr, stage.weight_decay if parameter.dim() > 1 else 0.0].append(parameter)
    if not groups:
        raise ConfigError(f"stage {stage.name}: lr_for sets every parameter to 0, so nothing is trained.")
    settings = [{"params": params, "weight_decay": decay, "share": share} for (share, decay), params in groups.items()]
    optimizer = AdamW(settings, lr=stage.lr, betas=stage.betas, fused=next(model.parameters()).is_cuda)
    return Updater(model, optimizer, clip=stage.clip)
