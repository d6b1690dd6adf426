"""How fast a training step is, ours beside stock `transformers` with Liger's kernels, on one GPU in one run.

    python benchmarks/train.py [--cases 8b-64k 8b-prolong 8b-128k 135m-32k] [--ours-only] [--profile] [--save]

Whole optimizer steps on random weights and tokens: forward, backward, clipping, update. The 8B shape is Llama-3's.
Ours: bf16 weights with stochastic rounding and 8-bit moments, fused norms, rotations and gates; results of attention
are kept, those of matrix products for as many layers as memory allows, some of them in host memory. The peer: Liger's
kernels, SDPA, gradient checkpointing, torch's fused AdamW in bf16; it has no document mask, so that ProLong's mix
(63% of rows one document, 37% short ones) costs it what 64K costs. The 135M shape is SmolLM2's, in four rows of 32K a
step; ours has fp32 masters there, the peer bf16 weights; nothing is recomputed.
Each case and side is a process of its own. MFU: without recomputation, attention halved for being causal, 989 TFLOP/s.
Liger is pure Python: `pip download --no-deps liger-kernel`, unzip it, name the folder in PYTHONPATH.
"""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from attention import ROW, short_documents
from gpu import in_own_process, machine, require_gpu, save
from transformers import AutoModelForCausalLM, LlamaConfig

from unspool.core.rng import rng_for
from unspool.data.packing.row import Row
from unspool.models.attention.interface import NAME, register
from unspool.models.fuse import fuse_parts
from unspool.models.memory.checkpointing import apply_memory
from unspool.training.config import StageConfig
from unspool.training.loader import build_step
from unspool.training.metrics.flops import count_flops, peak_flops
from unspool.training.optim.updater import build_updater
from unspool.training.step import train_step

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
DEVICE = torch.device("cuda")
LARGE = {
    "optimizer": {"weights": "bf16", "states": "8bit"},
    "activation_checkpointing": "keep-attention",
    "compile": True,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: dict[str, Any]
    length: int
    settings: dict[str, Any]  # of our stage
    rows_per_step: int = 1
    # Kinds of rows and how many of each; a step holds one kind, and times are weighed by these counts.
    kinds: tuple[tuple[tuple[int, ...], int], ...] = ()
    goal: int = 0  # tokens per second
    timed: int = 2
    # The case whose peer counts here as well, since it costs the peer the same.
    same_peer: str | None = None

    def rows(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        return self.kinds or (((self.length,), 1),)


SHORT = short_documents(rng_for(0, "attention"))
CASES = {
    "8b-64k": Case(
        shape=LLAMA_8B,
        length=ROW,
        goal=5300,
        settings=LARGE | {"offload": True, "keep_products": 30, "keep_on_host": 15},
    ),
    "8b-prolong": Case(
        shape=LLAMA_8B,
        length=ROW,
        goal=6300,
        kinds=(((ROW,), 5), (SHORT, 3)),
        same_peer="8b-64k",
        settings=LARGE | {"offload": True, "keep_products": 30, "keep_on_host": 15},
    ),
    "8b-128k": Case(
        shape=LLAMA_8B,
        length=2 * ROW,
        goal=3200,
        timed=1,
        settings=LARGE | {"offload": True, "keep_products": 8, "keep_on_host": 5},
    ),
    "135m-32k": Case(
        shape=SMOLLM2_135M, length=ROW // 2, rows_per_step=4, goal=75_000, timed=5, settings={"compile": True}
    ),
}


@dataclass
class Timing:
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ours-only", action="store_true", help="without the peer")
    parser.add_argument("--profile", action="store_true", help="print where the time of our step goes")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of our stage")
    parser.add_argument("--save", action="store_true", help="write results/train.json")
    parser.add_argument("--one", choices=("ours", "liger"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_gpu()
    if args.one:
        side = ours if args.one == "ours" else liger
        changes = dict(change.split("=", 1) for change in args.set)
        result = side(CASES[args.cases[0]], profile=args.profile, changes=changes)
        print(json.dumps(result))
        return
    print(machine(), flush=True)
    results = {}
    for name in args.cases:
        found = {"ours": in_process(name, "ours", args)}
        if not args.ours_only:
            known = results.get(CASES[name].same_peer or "", {}).get("liger")
            found["liger"] = known or in_process(name, "liger", args)
        results[name] = found | {"goal": CASES[name].goal}
        if len(found) > 1 and all(side.get("tokens_per_second") for side in found.values()):
            results[name]["ratio"] = found["ours"]["tokens_per_second"] / found["liger"]["tokens_per_second"]
        shown = f", {results[name]['ratio']:.2f} times the peer" if "ratio" in results[name] else ""
        print(f"{name}: goal {CASES[name].goal}{shown}", flush=True)
    if args.save:
        save("train.json", {"cases": results})


def in_process(name: str, side: str, args: Any) -> dict[str, Any]:
    """One side of one case in a process of its own, so that it has the whole memory."""
    arguments = [__file__, "--cases", name, "--one", side]
    arguments += ["--profile"] if args.profile and side == "ours" else []
    result = in_own_process(*arguments, *(["--set", *args.set] if args.set else []))
    if isinstance(result, int):
        print(f"{name} {side}: ended with code {result}", flush=True)
        return {"error": f"ended with code {result}"}
    rate, mfu = result["tokens_per_second"], result["mfu"]
    print(
        f"{name} {side}: {rate:.0f} tokens/s, MFU {mfu:.1%}, peak {result['peak_gib']:.1f} GiB, "
        f"loss {result['loss']:.3f}, steps of {', '.join(f'{s:.2f}' for s in result['step_seconds'])} s",
        flush=True,
    )
    print(f"  attention by {', '.join(result['attention_kernels'])}", flush=True)
    return result


def ours(case: Case, *, profile: bool, changes: dict[str, Any]) -> dict[str, Any]:
    register()
    model = build(case, attention=NAME)
    tokens = case.length * case.rows_per_step
    stage = StageConfig(
        **{
            "name": "bench",
            "context_length": case.length,
            "mix": {"rows": 1.0},
            "tokens": tokens,
            "batch_tokens": tokens,
            "lr": 1e-5,
        }
        | case.settings
        | changes
    )
    updater = build_updater(stage, model)
    fuse_parts(model)
    apply_memory(model, stage.memory)

    def step(docs: tuple[int, ...]) -> Callable[[], float]:
        rows: Any = {"rows": [random_row(case, docs, seed) for seed in range(case.rows_per_step)]}
        work = build_step(stage, rows, [[("rows", number)] for number in range(case.rows_per_step)])
        return lambda: train_step(model, updater, work, lr=stage.lr).loss

    shown = {key: value for key, value in stage.model_dump(mode="json", exclude_defaults=True).items() if key != "mix"}
    return timed(case, model, step, profile=profile) | {"settings": shown}


def liger(case: Case, *, profile: bool, changes: dict[str, Any]) -> dict[str, Any]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    model = build(case, attention="sdpa")
    if case.shape is LLAMA_8B:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(docs: tuple[int, ...]) -> Callable[[], float]:
        rows = [random_row(case, docs, seed).tokens.astype(np.int64) for seed in range(case.rows_per_step)]
        batches = [torch.from_numpy(row).to(DEVICE)[None] for row in rows]

        def run() -> float:
            total = 0.0
            for batch in batches:
                loss = model(input_ids=batch, labels=batch).loss / len(batches)
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        return run

    return timed(case, model, step, profile=False)


def build(case: Case, *, attention: str) -> Any:
    """Made on the device itself: on the host it would take minutes."""
    config = LlamaConfig(
        **case.shape,
        max_position_embeddings=case.length,
        rope_parameters={"rope_type": "default", "rope_theta": 8e6},
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    # Ours has fp32 masters of the small model, as its recipes do.
    small = case.shape is not LLAMA_8B
    with DEVICE:
        dtype = torch.float32 if small and attention == NAME else torch.bfloat16
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.config.use_cache = False
    return model.train()


def random_row(case: Case, docs: tuple[int, ...], seed: int) -> Row:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(case.shape["vocab_size"], size=case.length, dtype=np.uint32)
    lens = np.array(docs, dtype=np.int32)
    return Row(tokens=tokens, doc_lens=lens, loss_mask=None, source="random", attention="intra_document")


def timed(case: Case, model: Any, step: Callable[..., Callable[[], float]], *, profile: bool) -> dict[str, Any]:
    """Every kind of row: one step to warm up, then those that count."""
    flops = count_flops(model)
    seconds = work = tokens = 0.0
    all_seconds = []
    loss = float("nan")
    kernels: set[str] = set()
    for docs, count in case.rows():
        run = step(docs)
        began = time.perf_counter()
        kernels |= attention_kernels(run)
        print(f"  first step {time.perf_counter() - began:.1f} s", flush=True)
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(case.timed):
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss = run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        all_seconds += times
        seconds += count * float(np.median(times))
        work += count * case.rows_per_step * flops.step(docs)
        tokens += count * case.rows_per_step * case.length
        if profile:
            show_profile(run)
    peak = peak_flops(DEVICE)
    result = {
        "tokens_per_second": round(tokens / seconds, 1),
        "mfu": work / seconds / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "step_seconds": [round(one, 3) for one in all_seconds],
        "loss": loss,
        "attention_kernels": sorted(kernels),
    }
    del run
    gc.collect()
    return result


def attention_kernels(run: Callable[[], float]) -> set[str]:
    """Of the step that warms up, which does not count."""
    return {name[:80] for name in kernel_times(run) if any(word in name for word in KINDS["attention"])}


def kernel_times(run: Callable[[], float]) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in recorded.key_averages():
        times[event.key] += event.self_device_time_total
    return times


KINDS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas"),
    "copies": ("Memcpy", "Memset"),
}


def show_profile(run: Callable[[], float]) -> None:
    times = kernel_times(run)
    total = sum(times.values())
    kinds: Counter[str] = Counter()
    for name, microseconds in times.items():
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "all else")
        kinds[kind] += microseconds
    print("  " + ", ".join(f"{kind} {value / 1e6:.2f} s" for kind, value in kinds.most_common()))
    for name, microseconds in times.most_common(25):
        print(f"  {microseconds / 1e6:8.3f} s {microseconds / total:6.1%}  {name[:100]}")


if __name__ == "__main__":
    main()
