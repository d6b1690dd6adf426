"""Matrix products in FP8 that share their input, forward and backward, as one autograd function.

Every operand gets one scale, from its own largest value. Three products of a linear layer need both layouts of each
operand, because FP8 units multiply rows by rows: the forward pass reads the input and the weight by rows, the input's
gradient reads the weight by columns, and the weight's gradient reads the input and the output's gradient by columns.
Weights of products with one input are cast into one matrix, so that they are one product. On a CPU, torch casts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension


class Cast:
    """Matrices with the same number of columns (or rows, if `side_by_side`) as one FP8 matrix.

    `rows` is the matrix, `columns` its transpose, each contiguous; one of them may be None.
    """

    def __init__(
        self,
        matrices: tuple[Tensor, ...],
        dtype: torch.dtype = E4M3,
        *,
        rows: bool = True,
        columns: bool = True,
        side_by_side: bool = False,
        amax: Tensor | None = None,
    ) -> None:
        limit = torch.finfo(dtype).max
        self.amax = largest_value(matrices) if amax is None else amax
        self.scale = self.amax.clamp(min=1e-12) / limit
        joined = [matrix.shape[1 if side_by_side else 0] for matrix in matrices]
        shape = [len(matrices[0]), sum(joined)] if side_by_side else [sum(joined), matrices[0].shape[1]]
        new = matrices[0].new_empty
        self.rows = new(shape, dtype=dtype) if rows else None
        self.columns = new(shape[::-1], dtype=dtype) if columns else None
        first = 0
        for matrix, size in zip(matrices, joined, strict=True):
            part = slice(first, first + size)
            by_rows = None if self.rows is None else self.rows[:, part] if side_by_side else self.rows[part]
            by_columns = None if self.columns is None else self.columns[part] if side_by_side else self.columns[:, part]
            _cast(matrix, self.amax, by_rows, by_columns, limit)
            first += size


def largest_value(matrices: tuple[Tensor, ...]) -> Tensor:
    """Return the largest absolute value of all matrices, fp32 with one element."""
    found = matrices[0].new_zeros(1, dtype=torch.float32)
    for matrix in matrices:
        if matrix.is_cuda:
            from fp8_kernels import amax_

            amax_(found, matrix)
        else:
            found = torch.maximum(found, matrix.abs().max().float())
    return found


def _cast(matrix: Tensor, amax: Tensor, rows: Tensor | None, columns: Tensor | None, limit: float) -> None:
    if matrix.is_cuda:
        from fp8_kernels import cast_

        cast_(matrix, amax, rows, columns, largest=limit)
        return
    value = (matrix.float() * (limit / amax.clamp(min=1e-12))).clamp(-limit, limit)
    for out, source in ((rows, value), (columns, value.t())):
        if out is not None:
            out.copy_(source)


def multiply(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, *, fast: bool) -> Tensor:
    """Return left × rightᵀ in bf16; both are FP8 and contiguous by rows."""
    return torch._scaled_mm(
        left,
        right.t(),
        left_scale.reshape(()),
        right_scale.reshape(()),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast and left.is_cuda,
    )


class Products(torch.autograd.Function):
    """`hidden` times each of `weights`, [out, in], in FP8."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad_dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        given = Cast((flat,))
        weight = Cast(weights, columns=False)
        ctx.save_for_backward(given.columns, given.scale, weight.amax, *weights)
        ctx.shape, ctx.grad_dtype = hidden.shape, grad_dtype
        out = multiply(given.rows, given.scale, weight.rows, weight.scale, fast=True)
        sizes = [len(each) for each in weights]
        return tuple(part.reshape(*hidden.shape[:-1], -1) for part in out.split(sizes, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        columns, scale, weight_amax, *weights = ctx.saved_tensors
        flat = tuple(grad.reshape(-1, grad.shape[-1]) for grad in grads)
        grad = Cast(flat, ctx.grad_dtype, side_by_side=True)
        weight = Cast(tuple(weights), rows=False, amax=weight_amax)
        to_hidden = multiply(grad.rows, grad.scale, weight.columns, weight.scale, fast=False)
        to_weights = multiply(grad.columns, grad.scale, columns, scale, fast=False)
        parts = to_weights.split([len(each) for each in weights])
        return to_hidden.reshape(ctx.shape), None, *parts


def products(hidden: Tensor, *weights: Tensor, grad_dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    for name, size in (("tokens", hidden.shape[:-1].numel()), *(("outputs", len(weight)) for weight in weights)):
        if size % MULTIPLE:
            raise ValueError(f"FP8 products need a multiple of {MULTIPLE} {name}, not {size}.")
    found: tuple[Tensor, ...] = Products.apply(hidden, grad_dtype, *weights)  # type: ignore[no-untyped-call]
    return found
