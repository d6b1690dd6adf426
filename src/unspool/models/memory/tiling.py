"""Tiling: modules that compute each token separately run over tiles of the sequence.

A module [B, T, D] → [B, T, D] holds its intermediate results for one tile at a time. Results change only by rounding;
gradients of the weights are summed over tiles in fp32. The backward pass recomputes the module tile by tile (but not a
third time if its layer is checkpointed). It collects the weights' gradients in a buffer first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Forward = Callable[[Tensor], Tensor]


def apply_tiles(module: nn.Module, tile_len: int) -> None:
    """Make `module` compute at most `tile_len` tokens at a time."""
    whole: Forward = module.forward

    def tiled(hidden: Tensor) -> Tensor:
        if hidden.shape[1] <= tile_len:
            return whole(hidden)
        if not torch.is_grad_enabled():
            return _forward(whole, hidden, tile_len)
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        # A separate autograd node saves the input before the tiles run. The recomputation of a layer stops when all
        # saved tensors exist, so it never computes the tiles only to save their input. The empty tensor creates the
        # node even if the input needs no gradient.
        kept: Tensor = _Keep.apply(torch.empty(0, requires_grad=True), hidden)  # type: ignore[no-untyped-call]
        out: Tensor = _Tiles.apply(kept, _Run(whole, hidden, tile_len), kept.grad_fn, *weights)  # type: ignore[no-untyped-call]
        return out

    module.forward = tiled


class _Run:
    """The state of the forward pass that the backward pass needs to recompute a tile."""

    def __init__(self, whole: Forward, hidden: Tensor, tile_len: int) -> None:
        self.whole = whole
        self.tile_len = tile_len
        self.needs_grad = hidden.requires_grad
        self.device_type = hidden.device.type
        self.autocast = torch.is_autocast_enabled(self.device_type)
        self.dtype = torch.get_autocast_dtype(self.device_type)

    def precision(self) -> torch.autocast:
        # No autocast cache, so that a pass with gradients does not reuse a weight that was cast without them.
        return torch.autocast(self.device_type, self.dtype, enabled=self.autocast, cache_enabled=False)


class _Keep(torch.autograd.Function):
    """Autograd function that saves a tensor for the backward pass and returns it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: _Run, kept: Any, *weights: Tensor) -> Tensor:
        ctx.run, ctx.kept, ctx.weights = run, kept, weights
        with run.precision():
            return _forward(run.whole, hidden, run.tile_len)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run: _Run = ctx.run
        (hidden,) = ctx.kept.saved_tensors
        ctx.kept = None
        wanted = run.needs_grad
        hidden_grad = torch.empty_like(hidden) if wanted else None
        sums: list[Tensor | None] = [None] * len(ctx.weights)
        for start in range(0, hidden.shape[1], run.tile_len):
            tile = slice(start, start + run.tile_len)
            part = hidden[:, tile].detach().requires_grad_(wanted)
            with torch.enable_grad(), run.precision():
                out = run.whole(part)
            inputs = [part, *ctx.weights] if wanted else [*ctx.weights]
            grads = iter(torch.autograd.grad(out, inputs, grad[:, tile], allow_unused=True))
            if hidden_grad is not None:
                hidden_grad[:, tile] = next(grads)
            for number, weight_grad in enumerate(grads):
                sums[number] = _add(sums[number], weight_grad)
        totals = [
            None if total is None else total.to(weight.dtype) for total, weight in zip(sums, ctx.weights, strict=True)
        ]
        return (hidden_grad, None, None, *totals)


def _forward(whole: Forward, hidden: Tensor, tile_len: int) -> Tensor:
    """Write each tile into one output tensor; concatenating tiles would hold all of them twice."""
    out: Tensor | None = None
    for start in range(0, hidden.shape[1], tile_len):
        tile = whole(hidden[:, start : start + tile_len])
        if out is None:
            out = tile.new_empty(hidden.shape)
        out[:, start : start + tile_len] = tile
    assert out is not None
    return out


def _add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    if more is None:
        return total
    return more.float() if total is None else total.add_(more)
