"""Linear layers that multiply in FP8 while they train: forward, input gradient and weight gradient.

Linear layers that share an input become one product. Weights keep their own precision and are cast in every pass, so
optimizers, checkpoints and exports do not change. Embeddings, head, norms and attention are not cast. In eval mode, and
for a number of tokens that FP8 units cannot multiply, layers compute as before; so validation and samples use the model
that is exported.

Casts that a pass does not need are not written: a forward pass under a checkpoint needs no columns of the input, and
the recomputation of a kept product no rows. The input is saved before the product is computed, so that a recomputed
layer stops before its last product, as with `F.linear`.
"""

import weakref
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unspool.models.checks import layers_of
from unspool.models.fp8.operands import MULTIPLE, Operand, multiply, multiply_fast, round_gradients, round_to_fp8
from unspool.models.fp8.support import refuse_model, shared_inputs
from unspool.models.memory import kept
from unspool.models.memory.passes import saves_nothing


def use_fp8(model: Any, *, bf16_layers: int = 0) -> None:
    """Let the linear layers of all but the first and last `bf16_layers` layers of `model` multiply in FP8, in place.

    Call this after `fuse_parts` and before `apply_memory`. ConfigError if the model or its device does not fit.
    """
    refuse_model(model, bf16_layers)
    layers = layers_of(model)
    for layer in layers[bf16_layers : len(layers) - bf16_layers]:
        for linears in shared_inputs(layer):
            SharedInput(linears)


class SharedInput:
    """Linear layers with the same input. The first call computes all, the others return their part."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = tuple(linears)
        self._input: Any = None
        self._parts: dict[int, Tensor] = {}
        for number, linear in enumerate(linears):
            linear.forward = partial(_uncompiled(), self, number)  # type: ignore[method-assign]

    def forward(self, number: int, hidden: Tensor) -> Tensor:
        linear = self._linears[number]
        if not linear.training or hidden.numel() // hidden.shape[-1] % MULTIPLE:
            return F.linear(hidden, linear.weight, linear.bias)
        if self._input is None or self._input() is not hidden or number not in self._parts:
            parts = products(hidden, [each.weight for each in self._linears])
            self._input, self._parts = weakref.ref(hidden), dict(enumerate(parts))
        part = self._parts.pop(number)
        return part if linear.bias is None else part + linear.bias


@cache
def _uncompiled() -> Any:
    """Return `SharedInput.forward` as a function that is not compiled: it has Triton kernels and a cache."""
    return torch.compiler.disable(SharedInput.forward)  # type: ignore[no-untyped-call]


def products(hidden: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return `hidden` × weightᵀ for each weight, in FP8, with gradients in FP8."""
    flat = hidden.detach().reshape(-1, hidden.shape[-1])
    has_grad = torch.is_grad_enabled()
    wants_weights = has_grad and any(weight.requires_grad for weight in weights)
    with torch.no_grad():
        given = round_to_fp8((_dense(flat),), rows=not kept.replays(), columns=wants_weights and not saves_nothing())
        weight = round_to_fp8([each.detach() for each in weights], rows=not kept.replays(), columns=False)
    if not has_grad:
        return _joined(hidden, given, weight, weights)
    # The empty tensor creates the node even if the input needs no gradient.
    anchor = torch.empty(0, requires_grad=True)
    saved: Tensor = _Save.apply(anchor, hidden, given, weight, *weights)  # type: ignore[no-untyped-call]
    wanted = (hidden.requires_grad, wants_weights)
    found: tuple[Tensor, ...] = _Multiply.apply(saved, given, weight, saved.grad_fn, wanted, *weights)  # type: ignore[no-untyped-call]
    return found


def _joined(hidden: Tensor, given: Operand, weight: Operand, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    out = multiply_fast(given.rows, given.scale, weight.rows, weight.scale, dtype=hidden.dtype)
    parts = torch.split(out, [len(each) for each in weights], dim=1)
    return tuple(part.reshape(*hidden.shape[:-1], -1) for part in parts)


def _dense(matrix: Tensor) -> Tensor:
    """The matrix with rows that are contiguous, as casts read them; a sum's gradient, for example, is one value."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


class _Save(torch.autograd.Function):
    """Saves what the backward pass needs, before the product is computed: there a recomputation can end."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, given: Operand, weight: Operand, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(given.columns, given.scale, weight.amax, *weights)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, grads[0], None, None, *(None for _ in ctx.needs_input_grad[4:])


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, given: Operand, weight: Operand, saved: Any, wanted: Any, *weights: Tensor
    ) -> Any:
        ctx.saved, ctx.wanted, ctx.shape = saved, wanted, hidden.shape
        return _joined(hidden, given, weight, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        columns, scale, weight_amax, *weights = ctx.saved.saved_tensors
        ctx.saved = None
        wants_hidden, wants_weights = ctx.wanted
        flat = [_dense(each.reshape(-1, each.shape[-1])) for each in grads]
        grad = round_gradients(flat, rows=wants_hidden, columns=wants_weights)
        to_hidden = None
        if wants_hidden:
            weight = round_to_fp8(weights, rows=False, amax=weight_amax, divisors=grad.divisors)
            product = multiply(grad.rows, grad.scale, weight.columns, weight.scale, dtype=grads[0].dtype)
            to_hidden = product.reshape(ctx.shape)
        wanted = zip(grad.columns, grad.divisors, weights, ctx.needs_input_grad[5:], strict=True)
        to_weights = [
            multiply(part, grad.scale / divisor, columns, scale, dtype=each.dtype) if needs else None
            for part, divisor, each, needs in wanted
        ]
        return to_hidden, None, None, None, None, *to_weights
