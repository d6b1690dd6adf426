"""Speed of reading and answering prompts at the shape of Llama-3-8B, against plain `generate` of transformers.

    python benchmarks/eval.py [--save] [--dry]

Prefill of one prompt at 128K, ours and stock `generate` with `attn_implementation="sdpa"`, in tokens per second and as
a share of the rate that 8B can reach with cuDNN attention; one question and ten on one context of 64K; and many
unrelated prompts. Ours is fused as in an evaluation of many prompts; the stock model is not.

Stock SDPA selects its kernel by GPU, torch and cuDNN version: cuDNN on Hopper with cuDNN after 9.15, as ours, else
FlashAttention-2. Both are timed: torch's selection, and FlashAttention-2.

Each runs on a short prompt first and then twice; the faster run counts. `--dry` does the same with a tiny model on any
device, to test the script. Without `--dry` and without a GPU it exits with code 2.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cases import LLAMA_8B
from gpu import machine, require_gpu, save
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from unspool.core.rng import rng_for
from unspool.models.attention.interface import NAME, register
from unspool.models.fuse import fuse_for_reading, pays_to_fuse
from unspool.models.generation.greedy import answer, prefill_chunk_len

LLAMA_3_8B = LLAMA_8B | {
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
}
TINY = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Upper bound in tokens per second at 128K: an 8B model on one H200 if only FLOPs took time, attention at cuDNN's speed.
CEILING = 12_000
QUESTION, ANSWER, QUESTIONS = 48, 32, 10
# Like RULER's prompts at 4K, about equally long.
PROMPTS, PROMPT_SPREAD, PROMPT_ANSWER = 32, 7, 128
# Tokens of an evaluation that is long enough to compile for: RULER at 128K, 100 prompts of each of 13 tasks.
PLANNED_TOKENS = 13 * 100 << 17
# Goals: at least, or at most.
GOALS = {
    "share_of_ceiling": (">=", 0.85),
    "times_generate": (">=", 1.5),
    "times_flash": (">=", 1.5),
    "times_one": ("<=", 1.3),
}
WARM_SHARE = 8  # of a prompt is read before timing starts, so that libraries are loaded and kernels selected
REPEATS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/eval.json")
    parser.add_argument("--dry", action="store_true", help="a tiny model, on a CPU too")
    args = parser.parse_args()
    if not args.dry:
        require_gpu()
        print(machine())
    prompt, context = (4 << 10, 2 << 10) if args.dry else (128 << 10, 64 << 10)
    began = time.perf_counter()
    model = build(TINY if args.dry else LLAMA_3_8B)
    # Before the model is changed, and before any context manager of ours is entered.
    stock = stock_prefill(model, prompt)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        flash = stock_prefill(model, prompt)
    if pays_to_fuse(model, PLANNED_TOKENS):
        fuse_for_reading(model)
    results = {
        "prefill": prefill(model, prompt, stock, flash),
        "questions": questions(model, context),
        "prompts": prompts(model, (1 << 10 if args.dry else 4 << 10) - PROMPT_ANSWER),
    }
    # Goals do not apply to a tiny model.
    results["goals"] = {} if args.dry else goals({**results["prefill"], **results["questions"]})
    show(results)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if args.save and not args.dry:
        save("eval.json", results)


def build(shape: dict[str, Any]) -> Any:
    register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation=NAME)).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model


def stock_prefill(model: Any, length: int) -> tuple[float, float]:
    """Seconds and GiB of plain transformers."""
    ids = tokens(model, length)

    def plain(some: np.ndarray) -> None:
        batch = torch.from_numpy(some.astype(np.int64))[None].to(model.device)
        options = {"do_sample": False, "max_new_tokens": 1, "pad_token_id": 0}
        model.generate(batch, attention_mask=torch.ones_like(batch), **options)

    model.set_attn_implementation("sdpa")
    found = timed(model, lambda: plain(ids), warm=lambda: plain(ids[: length // WARM_SHARE]))
    model.set_attn_implementation(NAME)
    return found


def prefill(model: Any, length: int, stock: tuple[float, float], flash: tuple[float, float]) -> dict[str, Any]:
    """One prompt, one generated token."""
    ids = tokens(model, length)

    def ours(some: np.ndarray) -> None:
        answer(model, some[:-1], [some[-1:]], max_new_tokens=1, stop_ids=())

    our_seconds, our_gib = timed(model, lambda: ours(ids), warm=lambda: ours(ids[: length // WARM_SHARE]))
    their_seconds, their_gib = stock
    return {
        "tokens": length,
        "chunk": min(length, prefill_chunk_len(model, length)),
        "seconds": our_seconds,
        "tokens_per_second": length / our_seconds,
        "share_of_ceiling": length / our_seconds / CEILING,
        "peak_gib": our_gib,
        "generate_seconds": their_seconds,
        "generate_tokens_per_second": length / their_seconds,
        "generate_peak_gib": their_gib,
        "times_generate": their_seconds / our_seconds,
        "flash_seconds": flash[0],
        "times_flash": flash[0] / our_seconds,
    }


def questions(model: Any, length: int) -> dict[str, Any]:
    """One question on a context, and ten."""
    context = tokens(model, length)
    asked = [tokens(model, QUESTION + at, seed=at + 1) for at in range(QUESTIONS)]

    def ask(some: list[np.ndarray], context: np.ndarray) -> None:
        answer(model, context, some, max_new_tokens=ANSWER, stop_ids=())

    def both(some: list[np.ndarray]) -> float:
        short = context[: length // WARM_SHARE]
        return timed(model, lambda: ask(some, context), warm=lambda: ask(some, short))[0]

    one, ten = both(asked[:1]), both(asked)
    return {"context": length, "answer_tokens": ANSWER, "one_s": one, "ten_s": ten, "times_one": ten / one}


def prompts(model: Any, length: int) -> dict[str, Any]:
    """Unrelated prompts: seconds to read them, and seconds per token that all of them generate."""
    asked = [tokens(model, length - at % PROMPT_SPREAD, seed=at + 1) for at in range(PROMPTS)]

    def ask(max_new_tokens: int) -> float:
        def work() -> None:
            answer(model, asked[0][:0], asked, max_new_tokens=max_new_tokens, stop_ids=())

        return timed(model, work, warm=work)[0]

    read, whole = ask(1), ask(PROMPT_ANSWER)
    step = (whole - read) / (PROMPT_ANSWER - 1)
    return {"prompts": PROMPTS, "prompt_tokens": length, "answer_tokens": PROMPT_ANSWER, "read_s": read, "step_s": step}


def goals(found: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {"wanted": f"{sign} {limit:g}", "met": found[name] >= limit if sign == ">=" else found[name] <= limit}
        for name, (sign, limit) in GOALS.items()
    }


def show(results: dict[str, Any]) -> None:
    read, asked, many = results["prefill"], results["questions"], results["prompts"]
    rows = [
        (f"prefill of {read['tokens']:,} tokens, ours", f"{read['seconds']:.2f} s", f"{read['peak_gib']:.1f} GiB"),
        (
            "the same, stock generate with sdpa",
            f"{read['generate_seconds']:.2f} s",
            f"{read['generate_peak_gib']:.1f} GiB",
        ),
        ("the same with FlashAttention-2", f"{read['flash_seconds']:.2f} s", ""),
        (f"one question on {asked['context']:,} tokens", f"{asked['one_s']:.2f} s", ""),
        (f"{QUESTIONS} questions on it", f"{asked['ten_s']:.2f} s", ""),
        (f"reading {many['prompts']} prompts of {many['prompt_tokens']:,}", f"{many['read_s']:.2f} s", ""),
        ("and every token of their answers", f"{1000 * many['step_s']:.1f} ms", ""),
    ]
    print(f"{'':44}{'time':>12}{'peak':>12}")
    for name, seconds, memory in rows:
        print(f"{name:44}{seconds:>12}{memory:>12}")
    print(f"\n{read['tokens_per_second']:,.0f} tokens/s in chunks of {read['chunk']:,}")
    for name, goal in results["goals"].items():
        value = {**read, **asked}[name]
        print(f"{name:20} {value:6.2f}  wanted {goal['wanted']:8} {'met' if goal['met'] else 'not met'}")


def tokens(model: Any, count: int, seed: int = 0) -> np.ndarray:
    return rng_for(seed, "eval", count).integers(model.config.vocab_size, size=count).astype(np.uint32)


def timed(model: Any, work: Callable[[], Any], *, warm: Callable[[], Any]) -> tuple[float, float]:
    """Shortest time, and peak device memory (0 on a CPU)."""
    cuda = model.device.type == "cuda"
    warm()
    times = []
    if cuda:
        # Free the memory of the previous kernel, so that this one does not run out of it.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPEATS):
        _wait(model)
        began = time.perf_counter()
        work()
        _wait(model)
        times.append(time.perf_counter() - began)
    return min(times), torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
