"""AdamW's moments in 8 bits: blocks of 256 values, each with its largest magnitude as scale.

In: fp32 values. Out: codes (uint8, of the same shape) and scales (fp32, one per block).
Promise: levels, codes, scales and which tensors are quantised at all are those of torchao's `AdamW8bit`, bit for bit,
but for one rule: a second moment that is not zero never becomes zero.
Price: a value is off by up to some per cent, and one below a millionth of its block's largest by more.
Elsewhere: the same in one pass on a GPU (adamw_kernel.py).

The levels are those of dynamic tree quantisation (Dettmers et al., 8-bit Optimizers via Block-wise Quantization):
seven decades below 1, each with twice as many levels as the one below, evenly spaced within it.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 256
# Below this, scales and rounding cost more than the bytes are worth: norms, biases.
SMALLEST = 4096
DECADES = 7
# Of a block of zeros, which would otherwise be divided by zero.
LEAST_SCALE = 1e-12
# Roundings around the middle of two levels among which the bound between them is looked for.
NEAR = 8


@dataclass(eq=False)
class Quantized:
    """A moment in 8 bits."""

    codes: Tensor  # uint8, of the parameter's shape
    scales: Tensor  # fp32, one per block
    signed: bool

    @classmethod
    def zeros(cls, like: Tensor, *, signed: bool) -> "Quantized":
        codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
        return cls(codes, torch.zeros(like.numel() // BLOCK, device=like.device), signed)

    def read(self) -> Tensor:
        levels = tables(self.signed, self.codes.device)[0]
        blocks = levels[self.codes.view(-1, BLOCK).int()] * self.scales[:, None]
        return blocks.view(self.codes.shape)

    def write(self, value: Tensor) -> None:
        codes, scales = quantize(value, signed=self.signed)
        self.codes.copy_(codes)
        self.scales.copy_(scales)


def is_quantized(weight: Tensor) -> bool:
    """Whether moments of such a tensor are kept in 8 bits; the others stay fp32."""
    return weight.numel() >= SMALLEST and weight.numel() % BLOCK == 0


def quantize(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The nearest level of each value, the higher one of two that are equally near."""
    blocks = value.reshape(-1, BLOCK)
    scales = blocks.abs().amax(-1).clip(LEAST_SCALE)
    bounds = tables(signed, value.device)[1]
    codes = torch.bucketize(blocks / scales[:, None], bounds, out_int32=True, right=True)
    return codes.to(torch.uint8).view(value.shape), scales


@cache
def tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32[256] levels, ascending; fp32[255] bounds: from bound `i` on, level `i + 1` is nearer than level `i`."""
    levels = _levels(signed)
    bounds = _bounds(levels)
    if not signed:
        # AdamW divides by the root of the second moment. Where that is lost and the first is not, which its square
        # reaches a thousand times earlier, a step without a gradient would divide by EPS: a jump of many times lr.
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
    """The least fp32 of each gap that rounds up, which fp32 differences put some roundings beside the middle."""
    low, high = levels[:-1], levels[1:]
    value = ((low.double() + high.double()) / 2).float()
    for _ in range(NEAR):
        value = torch.nextafter(value, low)
    assert not _rounds_up(value, low, high).any()
    for _ in range(2 * NEAR):
        value = torch.where(_rounds_up(value, low, high), value, torch.nextafter(value, high))
    assert _rounds_up(value, low, high).all()
    return value


def _rounds_up(value: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return value - low >= (high - low) * 0.5
