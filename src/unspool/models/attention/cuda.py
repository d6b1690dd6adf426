"""Attention on CUDA in half precision: cuDNN for long documents, `varlen_attn` for the short rest.

It takes the arguments of attention.py and returns [B, S, H, D], equal to the reference up to rounding. It builds no
mask, does not wait for the device and does not expand grouped heads. cuDNN plans every new length for some hundred
milliseconds, so lengths are rounded up to a few and padded at the end, where causal attention does not look.
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

from unspool.models.attention.reference import Rules
from unspool.models.memory import kept

# cuDNN is 1.7 times FlashAttention-2 on Hopper and is not always torch's first choice.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
# The crossover: from how many FLOP of its forward pass on a document is worth a cuDNN call of its own, by the size
# of heads up to which that holds. Below, the time goes into launching; above the last size cuDNN has no backward pass.
# `python benchmarks/attention.py --crossover` measures it; these are an H200's.
DENSE_FROM: dict[int, float] = {64: 4.3e10, 128: 3.4e10}
# Lengths between one power of two and the next: more of them waste less on padding and cost more planning.
LENGTHS_PER_OCTAVE = 16
# FlashAttention-2's largest heads.
MAX_HEAD_DIM = 256


Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value


@dataclass(frozen=True)
class Plan:
    """How a packed row is divided: each long document alone, short neighbours together."""

    segment_lens: tuple[int, ...]
    dense: tuple[bool, ...]  # by segment
    short_lens: tuple[int, ...]  # documents of the segments that are not dense


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these; what they do not take is left to the reference."""
    dim = query.shape[-1]
    same = query.dtype == key.dtype == value.dtype and dim == value.shape[-1]
    return (
        query.is_cuda
        and same
        and query.dtype in (torch.bfloat16, torch.float16)
        and dim % 8 == 0
        and dim <= MAX_HEAD_DIM
    )


def attend(query: Tensor, key: Tensor, value: Tensor, rules: Rules, doc_lens: tuple[int, ...] | None) -> Tensor:
    batch, num_heads, num_queries, dim = query.shape
    num_keys = key.shape[2]
    if doc_lens is None and num_queries == 1:
        last = slice(0 if rules.window is None else max(0, num_keys - rules.window), num_keys)
        # Every token that is written makes a new length, for which cuDNN would plan anew.
        return _sdpa((query, key[:, :, last], value[:, :, last]), rules, is_causal=False, kernels=KERNELS[::-1])
    if doc_lens is None and (rules.window is not None or num_queries < num_keys):
        flat = (_rows(query).flatten(0, 1), _rows(key).flatten(0, 1), _rows(value).flatten(0, 1))
        out = _varlen(flat, (num_queries,) * batch, (num_keys,) * batch, rules)
        return out.view(batch, num_queries, num_heads, dim)
    if doc_lens is None and batch > 1:
        return _sdpa((query, key, value), rules, is_causal=True)
    doc_lens = doc_lens or (num_queries,)
    heads = (_rows(query)[0], _rows(key)[0], _rows(value)[0])
    if rules.window is not None:
        return _varlen(heads, doc_lens, doc_lens, rules)[None]
    if len(doc_lens) > 1 and len(set(doc_lens)) == 1 and rounded(doc_lens[0]) == doc_lens[0]:
        query, key, value = (tensor.reshape(len(doc_lens), -1, *tensor.shape[1:]) for tensor in heads)
        return _sdpa((_rows(query), _rows(key), _rows(value)), rules, is_causal=True).flatten(0, 1)[None]
    return _planned(heads, rules, plan(doc_lens, dense_from(num_heads, dim)))[None]


def dense_from(num_heads: int, dim: int) -> int | None:
    """Tokens from which a document gets a cuDNN call of its own; None if never."""
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


def rounded(length: int) -> int:
    """The next length that cuDNN plans for."""
    step = max(128, (1 << (length.bit_length() - 1)) // LENGTHS_PER_OCTAVE)
    return -(-length // step) * step


def _rows(tensor: Tensor) -> Tensor:
    """[B, H, S, D] ↔ [B, S, H, D]."""
    return tensor.transpose(1, 2)


def _planned(heads: Heads, rules: Rules, plan: Plan) -> Tensor:
    """[T, H, D]. Splitting and joining are one copy each, backward too."""
    pieces = list(zip(*(torch.split(tensor, list(plan.segment_lens)) for tensor in heads), strict=True))
    short = [piece for piece, dense in zip(pieces, plan.dense, strict=True) if not dense]
    short_outs: Iterator[Tensor] = iter(())
    if short:
        query, key, value = (each[0] if len(each) == 1 else torch.cat(each) for each in zip(*short, strict=True))
        out = _varlen((query, key, value), plan.short_lens, plan.short_lens, rules)
        short_outs = iter(torch.split(out, [len(piece[0]) for piece in short]))
    outs = [
        _dense((piece[0], piece[1], piece[2]), rules) if dense else next(short_outs)
        for piece, dense in zip(pieces, plan.dense, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _dense(heads: Heads, rules: Rules) -> Tensor:
    """One document [L, H, D], padded at the end."""
    length = len(heads[0])
    extra = rounded(length) - length
    query, key, value = (F.pad(tensor, (0, 0, 0, 0, 0, extra)) if extra else tensor for tensor in heads)
    return _sdpa((_rows(query[None]), _rows(key[None]), _rows(value[None])), rules, is_causal=True)[0, :length]


def _sdpa(heads: Heads, rules: Rules, *, is_causal: bool, kernels: list[SDPBackend] = KERNELS) -> Tensor:
    """From [B, H, S, D] to [B, S, H, D]."""
    query, key, value = heads
    options = {"is_causal": is_causal, "scale": rules.scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    with sdpa_kernel(kernels, set_priority=True):
        out: Tensor = kept.call(F.scaled_dot_product_attention, query, key, value, **options)
    return _rows(out)


@cache
def settle_kernel_order() -> None:
    """Let torch set its own order of SDPA kernels before our `sdpa_kernel` context is entered for the first time.

    Torch sets its order when it first selects a kernel, and the context restores the order that it found. If the first
    selection happened inside the context, it would restore an order with cuDNN last for all other code in this process:
    stock SDPA took twice the time on an H200. The order belongs to the process, so any device will do.

    This waits until something else starts CUDA, so that processes that only use the CPU never do.
    """
    torch.cuda._lazy_call(_select_kernel)  # type: ignore[no-untyped-call]


def _select_kernel() -> None:
    """Select a kernel for tensors without elements: nothing is allocated and nothing runs."""
    empty = torch.empty(1, 1, 0, 8, dtype=torch.bfloat16, device="cuda")
    torch._fused_sdp_choice(empty, empty, empty)


def _varlen(heads: Heads, query_lens: tuple[int, ...], key_lens: tuple[int, ...], rules: Rules) -> Tensor:
    """[T, H, D]. The kernel lets the last query stand at the last key, and its window leaves the query itself out."""
    query, key, value = heads
    grouped = {"enable_gqa": True} if _asks_for_groups() and query.shape[1] != key.shape[1] else {}
    out: Tensor = kept.call(
        varlen_attn,
        query,
        key,
        value,
        borders(query_lens, query.device),
        borders(key_lens, query.device),
        longest(query_lens),
        longest(key_lens),
        scale=rules.scaling,
        window_size=(-1 if rules.window is None else rules.window - 1, 0),
        **grouped,
    )
    return out


@cache
def _asks_for_groups() -> bool:
    """torch 2.11 hands fewer KV heads to the kernel as they are; later ones want to be told."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def longest(lens: tuple[int, ...]) -> int:
    """A power of two, so that slightly different batches look alike to the kernel's launcher."""
    return 1 << (max(lens) - 1).bit_length()


@lru_cache(maxsize=16)
def borders(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Where documents begin and end, on the device: made once for all layers, and without waiting for it."""
    # What is made in inference mode could not be saved for a later backward pass.
    with torch.inference_mode(False):
        ends = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
        return (ends.pin_memory() if device.type == "cuda" else ends).to(device, non_blocking=True)
