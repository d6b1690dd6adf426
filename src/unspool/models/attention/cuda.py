"""Attention on CUDA in half precision: cuDNN for long documents, `varlen_attn` for the short ones.

It returns [B, Q, H, D], equal to the reference up to rounding. It builds no mask, does not synchronize with the device
and does not repeat KV heads. cuDNN takes some hundred milliseconds to plan a new length. So lengths are rounded up to a
few sizes, with padding at the end that causal attention does not see.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from unspool.models.attention.reference import AttentionInputs
from unspool.models.memory import kept

# cuDNN is 1.7 times as fast as FlashAttention-2 on Hopper and is not always torch's first choice.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
# Crossover: FLOP of the forward pass above which a document gets its own cuDNN call. Keys are the largest head
# dimension that a value applies to. Below the crossover, launch overhead dominates. Above the last dimension, cuDNN has
# no backward pass. Measured on an H200 by `python benchmarks/attention.py --crossover`.
DENSE_FROM: dict[int, float] = {64: 4.3e10, 128: 3.4e10}
# Lengths between two powers of two. More lengths waste less on padding, but need more planning.
LENGTHS_PER_OCTAVE = 16
# Largest head dimension of FlashAttention-2.
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Plan:
    """How a packed sequence is divided: each long document alone, short neighbors together."""

    segment_lens: tuple[int, ...]
    dense: tuple[bool, ...]  # by segment
    short_lens: tuple[int, ...]  # document lengths in the segments that are not dense


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels accept these tensors; the reference computes all others."""
    dim = query.shape[-1]
    same = query.dtype == key.dtype == value.dtype and dim == value.shape[-1]
    return (
        query.is_cuda
        and same
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim % 8 == 0
        and dim <= MAX_HEAD_DIM
    )


def cuda_attention(inputs: AttentionInputs) -> Tensor:
    (query, key, value), doc_lens, window = inputs.heads, inputs.doc_lens, inputs.window
    batch, num_heads, num_queries, dim = query.shape
    num_keys = key.shape[2]
    if doc_lens is None and num_queries == 1:
        last = slice(0 if window is None else max(0, num_keys - window), num_keys)
        seen = inputs.with_heads(query, key[:, :, last], value[:, :, last])
        # Every generated token makes a new length, and cuDNN would plan for each of them.
        return _sdpa(seen, is_causal=False, kernels=KERNELS[::-1])
    if doc_lens is None and (window is not None or num_queries < num_keys):
        flat = inputs.with_heads(*(_swap_heads(tensor).flatten(0, 1) for tensor in inputs.heads))
        out = _varlen(flat, (num_queries,) * batch, (num_keys,) * batch)
        return out.view(batch, num_queries, num_heads, dim)
    if doc_lens is None and batch > 1:
        return _sdpa(inputs, is_causal=True)
    doc_lens = doc_lens or (num_queries,)
    tokens = inputs.with_heads(*(_swap_heads(tensor)[0] for tensor in inputs.heads))
    if window is not None:
        return _varlen(tokens, doc_lens, doc_lens)[None]
    if len(doc_lens) > 1 and len(set(doc_lens)) == 1 and padded_len(doc_lens[0]) == doc_lens[0]:
        docs = (tensor.reshape(len(doc_lens), -1, *tensor.shape[1:]) for tensor in tokens.heads)
        return _sdpa(inputs.with_heads(*map(_swap_heads, docs)), is_causal=True).flatten(0, 1)[None]
    return _attend_planned(tokens, plan(doc_lens, dense_from(num_heads, dim)))[None]


def dense_from(num_heads: int, dim: int) -> int | None:
    """Return the length from which a document gets its own cuDNN call; None if never."""
    work = next((work for size, work in DENSE_FROM.items() if dim <= size), None)
    return None if work is None else max(1, int((work / (2 * num_heads * dim)) ** 0.5))


@lru_cache(maxsize=64)
def plan(doc_lens: tuple[int, ...], long_from: int | None) -> Plan:
    segments: list[tuple[int, bool]] = []
    short_lens = []
    for doc_len in doc_lens:
        dense = long_from is not None and doc_len >= long_from
        if not dense:
            short_lens.append(doc_len)
        if segments and not dense and not segments[-1][1]:
            segments[-1] = (segments[-1][0] + doc_len, False)
        else:
            segments.append((doc_len, dense))
    return Plan(tuple(size for size, _ in segments), tuple(dense for _, dense in segments), tuple(short_lens))


def padded_len(length: int) -> int:
    """Return the next length that cuDNN plans for."""
    step = max(128, (1 << (length.bit_length() - 1)) // LENGTHS_PER_OCTAVE)
    return -(-length // step) * step


def _swap_heads(tensor: Tensor) -> Tensor:
    """Swap the dimensions of heads and tokens: [B, H, S, D] ↔ [B, S, H, D]."""
    return tensor.transpose(1, 2)


def _attend_planned(inputs: AttentionInputs, plan: Plan) -> Tensor:
    """Return [T, H, D]. Splitting and joining take one copy each, in the backward pass too."""
    segments = list(zip(*(torch.split(tensor, list(plan.segment_lens)) for tensor in inputs.heads), strict=True))
    short = [segment for segment, dense in zip(segments, plan.dense, strict=True) if not dense]
    short_outs: Iterator[Tensor] = iter(())
    if short:
        heads = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*short, strict=True))
        out = _varlen(inputs.with_heads(*heads), plan.short_lens, plan.short_lens)
        short_outs = iter(torch.split(out, [len(segment[0]) for segment in short]))
    outs = [
        _attend_dense(inputs.with_heads(*segment)) if dense else next(short_outs)
        for segment, dense in zip(segments, plan.dense, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend_dense(inputs: AttentionInputs) -> Tensor:
    """Attend within one document [L, H, D], padded at the end."""
    length = len(inputs.query)
    extra = padded_len(length) - length
    padded = (F.pad(tensor, (0, 0, 0, 0, 0, extra)) if extra else tensor for tensor in inputs.heads)
    return _sdpa(inputs.with_heads(*(_swap_heads(tensor[None]) for tensor in padded)), is_causal=True)[0, :length]


def _sdpa(inputs: AttentionInputs, *, is_causal: bool, kernels: list[SDPBackend] = KERNELS) -> Tensor:
    """Map [B, H, S, D] to [B, S, H, D]."""
    grouped = inputs.query.shape[1] != inputs.key.shape[1]
    options = {"is_causal": is_causal, "scale": inputs.scaling, "enable_gqa": grouped}
    with sdpa_kernel(kernels, set_priority=True):
        out: Tensor = kept.call(F.scaled_dot_product_attention, *inputs.heads, **options)
    return _swap_heads(out)


@cache
def initialize_kernel_order() -> None:
    """Let torch set its own order of SDPA kernels before our `sdpa_kernel` context is entered for the first time.

    Torch sets its order when it first selects a kernel, and the context restores the order that it found. If the first
    selection happened inside the context, cuDNN would be last for all other code in this process. Stock SDPA then took
    twice the time on an H200. The order is global to the process, so the device does not matter.

    The selection runs when other code initializes CUDA, so processes that only use the CPU never initialize it.
    """
    torch.cuda._lazy_call(_select_kernel)  # type: ignore[no-untyped-call]


def _select_kernel() -> None:
    """Select a kernel for tensors without elements: nothing is allocated and nothing runs."""
    empty = torch.empty(1, 1, 0, 8, dtype=torch.bfloat16, device="cuda")
    torch._fused_sdp_choice(empty, empty, empty)


def _varlen(inputs: AttentionInputs, query_lens: tuple[int, ...], key_lens: tuple[int, ...]) -> Tensor:
    """Return [T, H, D]. The kernel aligns the last query with the last key; its window excludes the query itself."""
    query, key, value = inputs.heads
    grouped = {"enable_gqa": True} if _has_enable_gqa() and query.shape[1] != key.shape[1] else {}
    out: Tensor = kept.call(
        varlen_attn,
        query,
        key,
        value,
        cumulative_lens(query_lens, query.device),
        cumulative_lens(key_lens, query.device),
        max_len(query_lens),
        max_len(key_lens),
        scale=inputs.scaling,
        window_size=(-1 if inputs.window is None else inputs.window - 1, 0),
        **grouped,
    )
    return out


@cache
def _has_enable_gqa() -> bool:
    """Whether `varlen_attn` needs `enable_gqa` for fewer KV heads than query heads: versions after torch 2.11 do."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def max_len(lens: tuple[int, ...]) -> int:
    """Return the next power of two, so that the kernel's launcher treats similar batches the same."""
    return 1 << (max(lens) - 1).bit_length()


@lru_cache(maxsize=16)
def cumulative_lens(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int32 document offsets on the device, cached for all layers, without synchronizing."""
    # A tensor made in inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        ends = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
        return (ends.pin_memory() if device.type == "cuda" else ends).to(device, non_blocking=True)
