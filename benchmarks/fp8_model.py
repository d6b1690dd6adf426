"""FP8 in the linear layers of a Llama model, with the memory settings of training: an experiment, not the product.

Linear layers that share an input become one product, and their results can be kept as those of `F.linear` can. Casts
that a pass does not need are not written: under a checkpoint, the forward pass needs no columns of the input, and the
recomputation of a kept product no rows. The last product of a recomputed layer is not computed again.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fp8_operands import E4M3, MULTIPLE, Cast, multiply
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from unspool.models.checks import layers_of
from unspool.models.memory import kept


def use_fp8(model: Any, *, grad_dtype: torch.dtype = E4M3, plain_layers: int = 0) -> None:
    """Let the linear layers of all but the first and last `plain_layers` layers multiply in FP8.

    Call this after `fuse_parts` and before `apply_memory`.
    """
    kept._OPERATORS = kept._OPERATORS | {torch.ops.aten._scaled_mm.default}
    layers = layers_of(model)
    for layer in layers[plain_layers : len(layers) - plain_layers]:
        attention, mlp = layer.self_attn, layer.mlp
        Joined((attention.q_proj, attention.k_proj, attention.v_proj), grad_dtype)
        Joined((attention.o_proj,), grad_dtype)
        Joined((mlp.gate_proj, mlp.up_proj), grad_dtype)
        Joined((mlp.down_proj,), grad_dtype, is_last=True)


class Joined:
    """Linear layers with the same input. The first call computes all, the others return their part."""

    def __init__(self, linears: Sequence[nn.Module], grad_dtype: torch.dtype, *, is_last: bool = False) -> None:
        self._linears, self._grad_dtype, self._is_last = tuple(linears), grad_dtype, is_last
        self._input: Any = None
        self._parts: dict[int, Tensor] = {}
        for number, linear in enumerate(linears):
            assert isinstance(linear, nn.Linear) and linear.bias is None
            linear.forward = partial(self._forward, number)

    def _forward(self, number: int, hidden: Tensor) -> Tensor:
        if self._input is None or self._input() is not hidden or number not in self._parts:
            weights = [linear.weight for linear in self._linears]
            parts = JoinedProducts.apply(hidden, self._grad_dtype, self._is_last, *weights)  # type: ignore[no-untyped-call]
            self._input, self._parts = weakref.ref(hidden), dict(enumerate(parts))
        return self._parts.pop(number)


class JoinedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad_dtype: torch.dtype, is_last: bool, *weights: Tensor) -> Any:
        flat = hidden.reshape(-1, hidden.shape[-1])
        assert len(flat) % MULTIPLE == 0, f"FP8 products need a multiple of {MULTIPLE} tokens"
        recording, replaying = _passes()
        again = isinstance(kept._mode.get(), kept._Replaying) and is_last
        given = Cast((flat,), write_rows=not (replaying or again), write_columns=not recording)
        weight = Cast(weights, columns=False, write_rows=not (replaying or again))
        ctx.save_for_backward(given.columns, given.scale, weight.amax, *weights)
        ctx.shape, ctx.grad_dtype = hidden.shape, grad_dtype
        sizes = [len(each) for each in weights]
        if again:  # nothing reads the last product of a recomputed layer
            out = hidden.new_empty(len(flat), sum(sizes))
        else:
            out = multiply(given.rows, given.scale, weight.rows, weight.scale, dtype=hidden.dtype, fast=True)
        return tuple(part.reshape(*hidden.shape[:-1], -1) for part in out.split(sizes, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight_amax, *weights = ctx.saved_tensors
        grad = Cast(tuple(each.reshape(-1, each.shape[-1]) for each in grads), ctx.grad_dtype, side_by_side=True)
        weight = Cast(tuple(weights), rows=False, amax=weight_amax)
        dtype = grads[0].dtype
        to_hidden = multiply(grad.rows, grad.scale, weight.columns, weight.scale, dtype=dtype, fast=False)
        to_weights = multiply(grad.columns, grad.scale, columns, scale, dtype=weights[0].dtype, fast=False)
        return to_hidden.reshape(ctx.shape), None, None, *to_weights.split([len(each) for each in weights])


def _passes() -> tuple[bool, bool]:
    """Return whether this is a product whose result is recorded, and whether one that is replayed."""
    modes = _get_current_dispatch_mode_stack()
    return tuple(any(isinstance(mode, kind) for mode in modes) for kind in (kept._Recording, kept._Replaying))  # type: ignore[return-value]
