"""Time of our attention against torch's kernels, forward and backward, in bf16.

    python benchmarks/attention.py [--save] [--crossover] [--no-flex]

Document mixes in a row of 64K tokens: one document; 64 of 1K; rows as ProLong has them (63% one document, 37% short
ones, here 5 rows and 3, one after another). Peers compute the same documents; a kernel that only takes equal lengths
is skipped if they differ. `--crossover` prints the length from which a document is faster in its own cuDNN call: the
numbers of DENSE_FROM in unspool/models/attention. Without a GPU it exits with code 2.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu import machine, milliseconds, require_gpu, save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from unspool.core.rng import rng_for
from unspool.models.attention import cuda
from unspool.models.attention.interface import attend
from unspool.models.attention.reference import AttentionInputs

ROW = 64 << 10
SHAPES = {"32/8 x 128": (32, 8, 128), "9/3 x 64": (9, 3, 64)}
SHORT_MEAN = 600
SWEEP = [512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
Documents = tuple[int, ...]
Way = Callable[[list[Tensor], Documents], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/attention.json")
    parser.add_argument("--crossover", action="store_true", help="measure from which length cuDNN calls are faster")
    parser.add_argument("--no-flex", action="store_true", help="skip FlexAttention, which takes long to compile")
    args = parser.parse_args()
    require_gpu()
    print(machine())
    results: dict[str, Any] = {}
    if args.crossover:
        results["crossover"] = {name: measure_crossover(*shape) for name, shape in SHAPES.items()}
    results["mixes"] = [
        measure(name, shape, mix, rows, flex=not args.no_flex)
        for name, shape in SHAPES.items()
        for mix, rows in mixes().items()
    ]
    if args.save:
        save("attention.json", results)


def mixes() -> dict[str, list[Documents]]:
    rng = rng_for(0, "attention")
    short = [short_documents(rng) for _ in range(3)]
    return {"one 64K": [(ROW,)], "64 x 1K": [(1024,) * 64], "prolong": [(ROW,)] * 5 + short}


def short_documents(rng: np.random.Generator) -> Documents:
    """Log-normal lengths, as in real text, cut at the end of the row."""
    ends = np.cumsum(rng.lognormal(np.log(SHORT_MEAN) - 0.5, 1.0, size=4 * ROW // SHORT_MEAN).astype(np.int64) + 1)
    return tuple(np.diff(np.minimum(ends[: int(np.searchsorted(ends, ROW)) + 1], ROW), prepend=0).tolist())


def measure(name: str, shape: tuple[int, int, int], mix: str, rows: list[Documents], *, flex: bool) -> dict[str, Any]:
    heads, grad = random_heads(*shape)
    ways: dict[str, Way] = {"ours": ours, "varlen": varlen, "cudnn": partial(dense, SDPBackend.CUDNN_ATTENTION)}
    ways["flash"] = partial(dense, SDPBackend.FLASH_ATTENTION)
    if flex:
        ways["flex"] = flex_documents()
    times: dict[str, float | None] = {}
    for way, function in ways.items():
        if way in ("cudnn", "flash") and any(len(set(row)) > 1 for row in rows):
            times[way] = None
            continue
        # Equal rows take equal time, so each kind is measured once.
        kinds = {row: rows.count(row) for row in rows}
        try:
            times[way] = sum(count * timed(function, heads, grad, row) for row, count in kinds.items())
        except RuntimeError as error:
            print(f"  {way}: {str(error).splitlines()[0]}")
            times[way] = None
    best = min(time for way, time in times.items() if way != "ours" and time is not None)
    shown = "  ".join(f"{way} {time:.1f}" if time is not None else f"{way} -" for way, time in times.items())
    ratio, over_varlen = times["ours"] / best, times["ours"] / times["varlen"]
    print(f"{name:12}{mix:10} ms: {shown}   ours / best {ratio:.3f}, ours / varlen {over_varlen:.3f}", flush=True)
    return {"shape": name, "mix": mix, "ms": times, "ours_over_best": ratio, "ours_over_varlen": over_varlen}


def timed(
    function: Callable[[list[Tensor], Documents], Tensor], heads: list[Tensor], grad: Tensor, row: Documents
) -> float:
    def work() -> None:
        for tensor in heads:
            tensor.grad = None
        function(heads, row).backward(grad)

    return milliseconds(work)


def random_heads(num_heads: int, num_kv_heads: int, dim: int, length: int = ROW) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values [1, H, S, D] in the memory layout of projections, and the output gradient [1, S, H, D]."""
    torch.manual_seed(0)
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    *heads, grad = (torch.randn(1, length, count, dim, device="cuda", dtype=torch.bfloat16) for count in counts)
    return [tensor.transpose(1, 2).requires_grad_() for tensor in heads], grad


def ours(heads: list[Tensor], row: Documents) -> Tensor:
    return attend(nn.Module(), *heads, None, doc_lens=row)[0]


def varlen(heads: list[Tensor], row: Documents) -> Tensor:
    return cuda._varlen(by_token(heads), row, row)[None]


def by_token(heads: list[Tensor]) -> AttentionInputs:
    query, key, value = (tensor[0].transpose(0, 1) for tensor in heads)
    return AttentionInputs(query=query, key=key, value=value)


def dense(kernel: SDPBackend, heads: list[Tensor], row: Documents) -> Tensor:
    rows = [tensor[0].transpose(0, 1).unflatten(0, (len(row), -1)).transpose(1, 2) for tensor in heads]
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[None]


def flex_documents() -> Way:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attention = torch.compile(flex_attention)
    blocks = torch.compile(create_block_mask)
    masks: dict[Documents, Any] = {}

    def run(heads: list[Tensor], row: Documents) -> Tensor:
        if row not in masks:
            ids = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)).cuda()
            masks[row] = blocks(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, ROW, ROW, device="cuda")
        return attention(*heads, block_mask=masks[row], enable_gqa=True).transpose(1, 2)

    return run


def measure_crossover(num_heads: int, num_kv_heads: int, dim: int) -> dict[str, Any]:
    """Time a 64K row per document length: one cuDNN call per document against one `varlen_attn`."""
    heads, grad = random_heads(num_heads, num_kv_heads, dim)
    ratios = {}
    for length in SWEEP:
        count = ROW // length
        row = (*(length,) * count, *((ROW - length * count,) if ROW % length else ()))

        def alone(heads: list[Tensor], row: Documents) -> Tensor:
            return cuda._attend_planned(by_token(heads), cuda.plan(row, 1))[None]

        ratios[length] = timed(alone, heads, grad, row) / timed(varlen, heads, grad, row)
    first = next((length for length in SWEEP if all(ratios[at] < 1 for at in SWEEP if at >= length)), None)
    work = None if first is None else 2.0 * num_heads * dim * first**2
    shown = ", ".join(f"{length}: {ratio:.2f}" for length, ratio in ratios.items())
    print(f"crossover {num_heads}/{num_kv_heads} x {dim}: cuDNN alone / varlen by length: {shown}")
    print(f"  from {first} tokens on, which is DENSE_FROM[{dim}] = {work}", flush=True)
    return {"ratios": ratios, "first": first, "dense_from": work}


if __name__ == "__main__":
    main()
