# mypy: ignore-errors
"""An AdamW step of one parameter as one Triton kernel. Imported on CUDA only.

It computes the same as `update_by_operators` (adamw.py), in the same order and with the same roundings. It reads and
writes every tensor once, and writes nothing if the given norm is not finite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unspool.training.optim.adamw import EPS, Factors
from unspool.training.optim.adamw8bit import BLOCK, MIN_SCALE, Quantized, tables
from unspool.training.optim.base import ParamState

# Blocks of 256 values that one program computes.
BLOCKS = 8
NUM_WARPS = 8


def update_in_one_pass(
    param: ParamState,
    grad: Tensor,
    factors: Factors,
    key: tuple[int, int],
    norm: Tensor | None,
    clip: Tensor | None = None,
) -> None:
    """Update one parameter; `clip` is a gradient factor on the device, used instead of `factors.scale`."""
    state, grad = param.state, grad.contiguous()
    assert param.weight.is_contiguous()
    size = param.weight.numel()
    quantized = isinstance(state.first, Quantized)
    moments = (state.first.codes, state.second.codes) if quantized else (state.first, state.second)
    scales = (state.first.scales, state.second.scales) if quantized else moments
    device = param.weight.device
    signed, unsigned = (tables(True, device), tables(False, device)) if quantized else (moments, moments)
    _kernel[(triton.cdiv(size, BLOCK * BLOCKS),)](
        param.weight,
        param.weight if param.bf16_copy is None else param.bf16_copy,
        grad,
        *moments,
        *scales,
        *signed,
        *unsigned,
        param.weight if norm is None else norm,
        param.weight if clip is None else clip,
        size,
        factors.lr,
        factors.shrink,
        factors.pull_first,
        factors.pull_second,
        factors.bias_first,
        factors.root_second,
        factors.scale,
        # As a signed number; otherwise Triton would compile again for keys of the upper half.
        *(word - (1 << 32) if word >> 31 else word for word in key),
        eps=EPS,
        least_scale=MIN_SCALE,
        quantized=quantized,
        stochastic=param.weight.dtype == torch.bfloat16,
        has_copy=param.bf16_copy is not None,
        has_norm=norm is not None,
        has_clip=clip is not None,
        block=BLOCK,
        blocks=BLOCKS,
        num_warps=NUM_WARPS,
        # Round products and sums separately, like a sequence of operators.
        enable_fp_fusion=False,
    )


@triton.jit
def _mixed(word):
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def _code(value, bounds):
    """Return the number of the 255 bounds at or below a value, by binary search."""
    code = tl.zeros(value.shape, dtype=tl.int32)
    for power in tl.static_range(8):
        code += tl.where(value >= tl.load(bounds + code + ((128 >> power) - 1)), 128 >> power, 0)
    return code


@triton.jit
def _quantize(moment, codes, bounds, at, inside, least_scale: tl.constexpr):
    """Write the codes; return the scale of every block."""
    scale = tl.maximum(tl.max(tl.abs(moment), axis=1), least_scale)
    code = _code(tl.div_rn(moment, scale[:, None]), bounds)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
    return scale


# Keys change every time: do not specialize the kernel for keys that 16 divides.
@triton.jit(do_not_specialize=["key_low", "key_high"])
def _kernel(
    weight, computed, grad, first, second, first_scales, second_scales, signed, signed_bounds, unsigned,
    unsigned_bounds, norm, clip, size, lr, shrink, pull_first, pull_second, bias_first, root_second, scale, key_low,
    key_high,
    eps: tl.constexpr, least_scale: tl.constexpr, quantized: tl.constexpr, stochastic: tl.constexpr,
    has_copy: tl.constexpr, has_norm: tl.constexpr, has_clip: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    at = row[:, None] * block + tl.arange(0, block)[None, :]
    if has_norm:
        # If the norm is not finite, the mask is empty, so nothing is read or written. NaN is not below infinity either.
        size = tl.where(tl.load(norm) < float("inf"), size, 0)
    if has_clip:
        scale = tl.load(clip)
    inside = at < size
    whole = row * block < size

    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if quantized:
        m_scale = tl.load(first_scales + row, mask=whole, other=0.0)
        v_scale = tl.load(second_scales + row, mask=whole, other=0.0)
        m = tl.load(signed + tl.load(first + at, mask=inside, other=0).to(tl.int32)) * m_scale[:, None]
        v = tl.load(unsigned + tl.load(second + at, mask=inside, other=0).to(tl.int32)) * v_scale[:, None]
    else:
        m = tl.load(first + at, mask=inside, other=0.0)
        v = tl.load(second + at, mask=inside, other=0.0)

    w = w - shrink * w
    # `lerp` is also one fused operation in torch.
    m = tl.fma(g - m, tl.zeros_like(m) + pull_first, m)
    v = tl.fma(g * g - v, tl.zeros_like(v) + pull_second, v)
    if quantized:
        m_scale = _quantize(m, first, signed_bounds, at, inside, least_scale)
        v_scale = _quantize(v, second, unsigned_bounds, at, inside, least_scale)
        tl.store(first_scales + row, m_scale, mask=whole)
        tl.store(second_scales + row, v_scale, mask=whole)
    else:
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)

    root = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + root_second) + eps
    w = w - tl.div_rn(lr * tl.div_rn(m, tl.zeros_like(m) + bias_first), root)
    if stochastic:
        word = _mixed(at.to(tl.uint32) ^ key_low.to(tl.uint32))
        noise = _mixed(word ^ key_high.to(tl.uint32)) >> 16
        bits = w.to(tl.uint32, bitcast=True) + noise
        tl.store(weight + at, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(weight + at, w, mask=inside)
    if has_copy:
        tl.store(computed + at, w.to(tl.bfloat16), mask=inside)
