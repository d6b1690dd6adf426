"""Operands of matrix products in FP8 (E4M3), and the product itself.

Every operand gets one scale, from its own largest value in the current pass; joined gradients get one each. Three
products of a linear layer need both layouts of each operand, because FP8 units multiply rows by rows: the forward pass
reads the input and the weight by rows, the input's gradient reads the weight by columns, and the weight's gradient
reads the input and the output's gradient by columns. Several matrices are cast into one, so that products with the same
input are one product. On a CPU, torch casts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LIMIT = torch.finfo(E4M3).max  # 448
# Smallest value that counts as an operand's largest, so that neither factor nor scale leaves the range of fp32.
LEAST = 2.0**-100
# Smaller gradients than this share of the largest of joined gradients are rounded as if they were that large.
LEAST_SHARE = 2.0**-40
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


@dataclass(frozen=True)
class Gradients:
    """Matrices side by side as one FP8 matrix. Matrix n is its part times `scale` ÷ `divisors[n]`, a power of 2.

    Gradients of queries and keys can be thousands of times smaller than those of values. With one scale, they would
    round to 0.
    """

    rows: Tensor
    columns: tuple[Tensor, ...]  # the parts of the transpose
    divisors: tuple[Tensor, ...]  # fp32, [1]
    scale: Tensor  # fp32, [1]


def round_to_fp8(
    matrices: Sequence[Tensor],
    *,
    rows: bool = True,
    columns: bool = True,
    amax: Tensor | None = None,
    divisors: Sequence[Tensor] | None = None,
) -> Operand:
    """Round matrices, [n, columns], to FP8, divided by `divisors`; `amax` is their largest value, if known."""
    amax = largest_value(matrices) if amax is None else amax
    sizes = [len(matrix) for matrix in matrices]
    shape = [sum(sizes), matrices[0].shape[1]]
    by_rows = _allocate(matrices[0], shape, is_written=rows)
    by_columns = _allocate(matrices[0], shape[::-1], is_written=columns)
    limits = [amax] * len(matrices) if divisors is None else [_at_least(amax) * each for each in divisors]
    for matrix, limit, part in zip(matrices, limits, _parts(sizes), strict=True):
        _cast(matrix, limit, by_rows[part] if rows else None, by_columns[:, part] if columns else None)
    return Operand(by_rows, by_columns, amax, _at_least(amax) / _limit(amax))


def round_gradients(matrices: Sequence[Tensor], *, rows: bool, columns: bool) -> Gradients:
    """Round matrices, [rows, n], to FP8."""
    sizes = [matrix.shape[1] for matrix in matrices]
    shape = [len(matrices[0]), sum(sizes)]
    by_rows = _allocate(matrices[0], shape, is_written=rows)
    by_columns = _allocate(matrices[0], shape[::-1], is_written=columns)
    each = [largest_value([matrix]) for matrix in matrices]
    amax = _at_least(torch.stack(each).amax(dim=0))
    divisors = _divisors(amax, each)
    for matrix, divisor, part in zip(matrices, divisors, _parts(sizes), strict=True):
        _cast(matrix, amax / divisor, by_rows[:, part] if rows else None, by_columns[part] if columns else None)
    return Gradients(by_rows, torch.split(by_columns, sizes), divisors, amax / _limit(amax))


def _divisors(amax: Tensor, each: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(each) == 1:
        return (torch.ones_like(amax),)
    return tuple(_power_of_two(amax / torch.maximum(own, amax * LEAST_SHARE)) for own in each)


def _power_of_two(ratio: Tensor) -> Tensor:
    """Return the largest power of 2 that is not above `ratio`, exactly."""
    return ratio / (2 * torch.frexp(ratio).mantissa)


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += size


def _allocate(like: Tensor, shape: list[int], *, is_written: bool) -> Tensor:
    return like.new_empty(shape, dtype=E4M3) if is_written else like.new_empty(1, dtype=E4M3).expand(shape)


def _at_least(amax: Tensor) -> Tensor:
    return amax.clamp(min=LEAST)


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
    if rows is None and columns is None:
        return
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
    factor = _limit(amax) / _at_least(amax)
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
