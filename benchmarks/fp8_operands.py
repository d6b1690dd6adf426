"""Operands of matrix products in FP8.

Every operand gets one scale, from its own largest value. Three products of a linear layer need both layouts of each
operand, because FP8 units multiply rows by rows: the forward pass reads the input and the weight by rows, the input's
gradient reads the weight by columns, and the weight's gradient reads the input and the output's gradient by columns.
Several matrices are cast into one, so that products with the same input are one product. On a CPU, torch casts.
"""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of every dimension


class Cast:
    """Matrices with the same number of columns (or rows, if `side_by_side`) as one FP8 matrix.

    `rows` is the matrix, `columns` its transpose, each contiguous; one of them may be None. A layout that is not
    written has its shape and arbitrary values.
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
        write_rows: bool = True,
        write_columns: bool = True,
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
            by_rows = by_columns = None
            if self.rows is not None and write_rows:
                by_rows = self.rows[:, part] if side_by_side else self.rows[part]
            if self.columns is not None and write_columns:
                by_columns = self.columns[part] if side_by_side else self.columns[:, part]
            if by_rows is not None or by_columns is not None:
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


def multiply(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, *, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return left × rightᵀ; both are FP8 and contiguous by rows."""
    return torch._scaled_mm(
        left,
        right.t(),
        left_scale.reshape(()),
        right_scale.reshape(()),
        out_dtype=dtype,
        use_fast_accum=fast and left.is_cuda,
    )
