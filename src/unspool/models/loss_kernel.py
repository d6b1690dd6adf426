# mypy: ignore-errors
"""Softmax, loss and gradient of a chunk of logits in place, as one Triton kernel. Imported on CUDA only.

It computes the same as `_softmax_grad` in loss.py, with sums in fp32. Logits are read twice (the second time mostly
from cache) and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unspool.data.packing.row import IGNORE

BLOCK = 8192
NUM_WARPS = 16


def softmax_grad_(
    logits: Tensor, labels: Tensor, scale: float, softcap: float | None, weights: Tensor | None = None
) -> Tensor:
    """Return every row's loss, fp32[n]; `logits` [n, V] become d loss / d logits, times `weights`, fp32[n]."""
    assert logits.stride(1) == 1
    assert weights is None or (weights.dtype == torch.float32 and weights.is_contiguous())
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _kernel[(len(logits),)](
        logits,
        labels,
        losses,
        losses if weights is None else weights,  # without weights, the kernel does not read them
        logits.stride(0),
        logits.shape[1],
        scale,
        softcap or 1.0,
        capped=softcap is not None,
        weighted=weights is not None,
        ignore=IGNORE,
        block=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        num_warps=NUM_WARPS,
    )
    return losses


@triton.jit
def _shape(raw, scale, cap, capped: tl.constexpr):
    value = raw.to(tl.float32) * scale
    if capped:
        # tanh by sigmoid, which every version of Triton has.
        value = cap * (2 * tl.sigmoid(2 * value / cap) - 1)
    return value


@triton.jit
def _kernel(
    logits, labels, losses, weights, stride, num_words, scale, cap, capped: tl.constexpr, weighted: tl.constexpr,
    ignore: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    label = tl.load(labels + row)
    words = tl.arange(0, block)
    if label == ignore:
        for first in range(0, num_words, block):
            at = first + words
            tl.store(start + at, tl.zeros([block], dtype=logits.dtype.element_ty), mask=at < num_words)
        tl.store(losses + row, 0.0)
        return
    peaks = tl.full([block], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([block], dtype=tl.float32)
    for first in range(0, num_words, block):
        at = first + words
        raw = tl.load(start + at, mask=at < num_words, other=0.0)
        value = tl.where(at < num_words, _shape(raw, scale, cap, capped), float("-inf"))
        higher = tl.maximum(peaks, value)
        # Lanes that have not read a logit yet are at −∞, where the difference would be NaN.
        sums = tl.where(higher == float("-inf"), 0.0, sums * tl.exp(peaks - higher) + tl.exp(value - higher))
        peaks = higher
    peak = tl.max(peaks, axis=0)
    log_norm = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0))
    chosen = _shape(tl.load(start + label), scale, cap, capped)
    tl.store(losses + row, log_norm - chosen)
    if weighted:
        weight = tl.load(weights + row)
    for first in range(0, num_words, block):
        at = first + words
        raw = tl.load(start + at, mask=at < num_words, other=0.0)
        value = _shape(raw, scale, cap, capped)
        grad = (tl.exp(value - log_norm) - tl.where(at == label, 1.0, 0.0)) * scale
        if capped:
            grad *= 1 - (value / cap) * (value / cap)
        if weighted:
            grad *= weight
        tl.store(start + at, grad.to(logits.dtype.element_ty), mask=at < num_words)
