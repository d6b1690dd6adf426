"""AdamW's moments in 8 bits: blocks of 256 values, each with its largest magnitude as scale.

Levels, codes, scales and the choice of quantized tensors equal those of torchao's `AdamW8bit`, bit for bit. There is
one exception: a second moment that is not zero never becomes zero. Errors are a few percent at most, or more for values
below a millionth of their block's largest. kernels.py does the same in one pass on a GPU.

If ranks shard a parameter, blocks are those of the full parameter. Its moments are kept in 8 bits only if no shard ends
inside a block, and in fp32 otherwise. So a moment has the same codes and scales on any number of ranks.

The levels are those of dynamic tree quantization (Dettmers et al., 8-bit Optimizers via Block-wise Quantization): seven
decades below 1, each with twice as many evenly spaced levels as the decade below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod

import torch
from torch import Tensor

BLOCK = 256
# Smaller tensors (norms, biases) stay fp32: the few bytes saved are not worth the scales and rounding.
MIN_SIZE = 4096
DECADES = 7
# Scale of a block of zeros, to avoid a division by zero.
MIN_SCALE = 1e-12
# Search range for the bound between two levels, in fp32 steps around their midpoint.
SEARCH_STEPS = 8


@dataclass(eq=False)
class Quantized:
    """A moment in 8 bits."""

    codes: Tensor  # uint8, of the parameter's shape
    scales: Tensor  # fp32 [groups of rows, blocks in a group]
    signed: bool

    @classmethod
    def zeros(cls, like: Tensor, *, signed: bool) -> "Quantized":
        codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
        rows, blocks = group_shape(like.shape)
        return cls(codes, torch.zeros(len(like) // rows, blocks, device=like.device), signed)

    def read(self) -> Tensor:
        levels = tables(self.signed, self.codes.device)[0]
        blocks = levels[self.codes.view(-1, BLOCK).int()] * self.scales.view(-1, 1)
        return blocks.view(self.codes.shape)

    def write(self, value: Tensor) -> None:
        codes, scales = quantize(value, signed=self.signed)
        self.codes.copy_(codes)
        self.scales.copy_(scales.view(self.scales.shape))


def group_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the fewest rows of a tensor that are whole blocks, and the number of these blocks.

    Scales have one row for each such group, so they are sharded like the rows of the weight.
    """
    row = prod(shape[1:])
    rows = BLOCK // gcd(row, BLOCK)
    return rows, rows * row // BLOCK


def is_quantized(shape: Sequence[int], rows_per_rank: int) -> bool:
    """Return whether the moments of a parameter of this full shape are kept in 8 bits; otherwise they stay fp32."""
    size = prod(shape)
    return size >= MIN_SIZE and size % BLOCK == 0 and rows_per_rank % group_shape(shape)[0] == 0


def quantize(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest levels (of two equally near levels, the higher), and the scales."""
    blocks = value.reshape(-1, BLOCK)
    scales = blocks.abs().amax(-1).clip(MIN_SCALE)
    bounds = tables(signed, value.device)[1]
    codes = torch.bucketize(blocks / scales[:, None], bounds, out_int32=True, right=True)
    return codes.to(torch.uint8).view(value.shape), scales


@cache
def tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return fp32[256] ascending levels and fp32[255] bounds; from bound `i` on, level `i + 1` is nearer."""
    levels = _levels(signed)
    bounds = _bounds(levels)
    if not signed:
        # AdamW divides by the root of the second moment. It underflows earlier than the first moment, because it is a
        # square. With a second moment of zero, a step without a gradient would divide by EPS: a jump of many times lr.
        bounds[0] = torch.finfo(torch.float32).tiny
    return levels.to(device), bounds.to(device)


def _levels(signed: bool) -> Tensor:
    found = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, (2**decade if signed else 2 ** (decade + 1)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2.0
        values = (10 ** (decade - DECADES + 1) * middles).tolist()
        found += values + ([-value for value in values] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32)


def _bounds(levels: Tensor) -> Tensor:
    """Return the least fp32 in each gap that rounds up: a few steps off the midpoint, because differences round."""
    low, high = levels[:-1], levels[1:]
    value = ((low.double() + high.double()) / 2).float()
    for _ in range(SEARCH_STEPS):
        value = torch.nextafter(value, low)
    assert not _rounds_up(value, low, high).any()
    for _ in range(2 * SEARCH_STEPS):
        value = torch.where(_rounds_up(value, low, high), value, torch.nextafter(value, high))
    assert _rounds_up(value, low, high).all()
    return value


def _rounds_up(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return value - low >= (high - low) * 0.5
