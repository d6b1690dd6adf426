# mypy: ignore-errors
"""Casts to FP8 as Triton kernels: the largest absolute value, and one pass that writes a matrix and its transpose.

Separate casts and transposes read bf16 twice and take as long as FP8 products save. Each tile is read once here, and
both layouts are written as whole lines. Divisions round as IEEE demands, so results equal those of torch bit for bit
from compute capability 9.0 on. On 8.9, Triton rounds to fp16 first, so that a value near the middle of two can go to
the other one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
NUM_WARPS = 8
TILES_EACH = 8  # that one program of the maximum reads


def raise_to_largest(out: Tensor, matrix: Tensor) -> None:
    """Raise `out`, fp32 with one element, to the largest absolute value of `matrix`, [rows, columns]."""
    assert matrix.dim() == 2 and matrix.stride(1) == 1
    rows, columns = matrix.shape
    tiles = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    _raise[(triton.cdiv(tiles, TILES_EACH),)](
        matrix, out, rows, columns, matrix.stride(0), each=TILES_EACH, tile=TILE, num_warps=NUM_WARPS
    )


def cast(
    matrix: Tensor, amax: Tensor, rows_out: Tensor | None, columns_out: Tensor | None, *, limit: float, least: float
) -> None:
    """Write `matrix` × (`limit` ÷ `amax`) to `rows_out`, [rows, columns], and its transpose to `columns_out`.

    Either may be None, and both may be slices of a larger matrix. `amax` counts as at least `least`.
    """
    assert matrix.dim() == 2 and matrix.stride(1) == 1
    if matrix.dtype == torch.float32 and rows_out is not None and columns_out is not None:
        # Triton 3.6 writes wrong columns if one kernel writes both layouts of an fp32 matrix. Training casts bf16.
        cast(matrix, amax, rows_out, None, limit=limit, least=least)
        rows_out = None
    out = rows_out if rows_out is not None else columns_out
    rows, columns = matrix.shape
    _cast[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))](
        matrix,
        amax,
        out if rows_out is None else rows_out,
        out if columns_out is None else columns_out,
        rows,
        columns,
        matrix.stride(0),
        0 if rows_out is None else rows_out.stride(0),
        0 if columns_out is None else columns_out.stride(0),
        limit=limit,
        least=least,
        by_rows=rows_out is not None,
        by_columns=columns_out is not None,
        tile=TILE,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _raise(matrix, out, rows, columns, stride, each: tl.constexpr, tile: tl.constexpr):
    across = tl.cdiv(columns, tile)
    largest = tl.zeros([tile], dtype=tl.float32)
    for one in range(each):
        number = tl.program_id(0) * each + one
        row = ((number // across) * tile + tl.arange(0, tile)).to(tl.int64)
        column = (number % across) * tile + tl.arange(0, tile)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(value.to(tl.float32)), axis=1))
    tl.atomic_max(out, tl.max(largest, axis=0))


@triton.jit
def _cast(
    matrix, amax, rows_out, columns_out, rows, columns, stride, rows_stride, columns_stride,
    limit: tl.constexpr, least: tl.constexpr, by_rows: tl.constexpr, by_columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * tile + tl.arange(0, tile)).to(tl.int64)
    column = (tl.program_id(1) * tile + tl.arange(0, tile)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.load(amax), least)
    # `/` may be off by one rounding, and `div_rn` may not.
    value = value * tl.div_rn(tl.zeros_like(largest) + limit, largest)
    value = tl.maximum(value, -limit, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL).to(rows_out.dtype.element_ty)
    if by_rows:
        tl.store(rows_out + row[:, None] * rows_stride + column[None, :], value, mask=inside)
    if by_columns:
        place = columns_out + column[:, None] * columns_stride + row[None, :]
        tl.store(place, tl.trans(value), mask=(column < columns)[:, None] & (row < rows)[None, :])
