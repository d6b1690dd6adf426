"""Operands of matrix products in FP8 (E4M3), and the product itself.

Every operand gets one scale, from its own largest value. Three products of a linear layer need both layouts of each
operand, because FP8 units multiply rows by rows: the forward pass reads the input and the weight by rows, the input's
gradient reads the weight by columns, and the weight's gradient reads the input and the output's gradient by columns.
Several matrices are cast into one, so that products with the same input are one product. On a CPU, torch casts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LIMIT = torch.finfo(E4M3).max  # 448
# Smallest value that counts as an operand's largest, so that neither factor nor scale leaves the range of fp32.
LEAST = 2.0**-100
MULTIPLE = 16  # of every dimension of a product


@dataclass(frozen=True)
class Operand:
    """Matrices as one FP8 matrix: `rows`, and its transpose `columns`. Either times `scale` is the rounded matrix.

    A layout that was not asked for has its shape, one arbitrary value, and takes no memory.
    """

    rows: Tensor
    columns: Tensor
    amax: Tensor  # fp32, [1]
    scale: Tensor  # fp32, [1]


def round_to_fp8(
    matrices: Sequence[Tensor],
    *,
    rows: bool = True,
    columns: bool = True,
    side_by_side: bool = False,
    amax: Tensor | None = None,
) -> Operand:
    """Round matrices, [n, columns] or `side_by_side` [rows, n], to FP8; `amax` is their largest value, if known."""
    amax = largest_value(matrices) if amax is None else amax
    sizes = [matrix.shape[1 if side_by_side else 0] for matrix in matrices]
    shape = [len(matrices[0]), sum(sizes)] if side_by_side else [sum(sizes), matrices[0].shape[1]]
    by_rows = _allocate(matrices[0], shape, is_written=rows)
    by_columns = _allocate(matrices[0], shape[::-1], is_written=columns)
    first = 0
    for matrix, size in zip(matrices, sizes, strict=True):
        part = slice(first, first + size)
        to_rows = (by_rows[:, part] if side_by_side else by_rows[part]) if rows else None
        to_columns = (by_columns[part] if side_by_side else by_columns[:, part]) if columns else None
        if rows or columns:
            _cast(matrix, amax, to_rows, to_columns)
        first += size
    return Operand(by_rows, by_columns, amax, amax.clamp(min=LEAST) / _limit(amax))


def _allocate(like: Tensor, shape: list[int], *, is_written: bool) -> Tensor:
    return like.new_empty(shape, dtype=E4M3) if is_written else like.new_empty(1, dtype=E4M3).expand(shape)


def largest_value(matrices: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of all matrices, fp32 with one element."""
    found = matrices[0].new_zeros(1, dtype=torch.float32)
    for matrix in matrices:
        if matrix.is_cuda:
            from unspool.models.fp8.kernels import raise_to_largest

            raise_to_largest(found, matrix)
        else:
            found = torch.maximum(found, matrix.abs().max().float())
    return found


def _cast(matrix: Tensor, amax: Tensor, rows: Tensor | None, columns: Tensor | None) -> None:
    if matrix.is_cuda:
        from unspool.models.fp8.kernels import cast

        cast(matrix, amax, rows, columns, limit=LIMIT, least=LEAST)
        return
    value = reference_cast(matrix, amax)
    for out, source in ((rows, value), (columns, value.t())):
        if out is not None:
            out.copy_(source)


def reference_cast(matrix: Tensor, amax: Tensor) -> Tensor:
    """Return `matrix` × (limit ÷ amax) in FP8, in plain torch; kernels.py computes the same bits."""
    factor = _limit(amax) / amax.clamp(min=LEAST)
    return (matrix.float() * factor).clamp(-LIMIT, LIMIT).to(E4M3)


def _limit(amax: Tensor) -> Tensor:
    # A tensor: torch divides a number by a tensor, and a tensor on a GPU by a number, with one more rounding.
    return torch.full_like(amax, LIMIT)


def multiply(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return left × rightᵀ; both are FP8 and contiguous by rows. Sums are fp32."""
    return _multiply(left, left_scale, right, right_scale, dtype, fast=False)


def multiply_fast(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`multiply` with sums that a GPU keeps in fewer bits: precise enough for the forward pass, not for gradients."""
    return _multiply(left, left_scale, right, right_scale, dtype, fast=left.is_cuda)


def _multiply(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    scales = left_scale.reshape(()), right_scale.reshape(())
    return torch._scaled_mm(left, right.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
