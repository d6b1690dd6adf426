"""How fast prompts are read and answered at the shape of Llama-3-8B, beside plain `generate` of transformers.

    python benchmarks/eval.py [--save] [--dry]

Prefill of one prompt at 128K, ours and `generate`'s, in tokens per second and as a share of what 8B can reach where
attention is computed by cuDNN; one question and ten on one context of 64K. `--dry` does the same with a tiny model on
whatever device there is, to see that it runs; without it and without a GPU it says so and ends with code 2.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu import machine, require_gpu, save
from transformers import LlamaConfig, LlamaForCausalLM

from unspool.base.rng import rng_for
from unspool.model.attention import NAME, register
from unspool.model.generate import answer, chunk_len

LLAMA_3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
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
# Tokens per second of an 8B model on one H200 if nothing but its FLOPs took time, attention at cuDNN's speed, at 128K.
CEILING = 12_000
QUESTION, ANSWER, QUESTIONS = 48, 32, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/eval.json")
    parser.add_argument("--dry", action="store_true", help="a tiny model, on a CPU too")
    args = parser.parse_args()
    if not args.dry:
        require_gpu()
        print(machine())
    prompt, context = (4 << 10, 2 << 10) if args.dry else (128 << 10, 64 << 10)
    model = build(TINY if args.dry else LLAMA_3_8B)
    results = {"prefill": prefill(model, prompt), "questions": questions(model, context)}
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


def prefill(model: Any, length: int) -> dict[str, Any]:
    """One prompt, of which one token is generated."""
    ids = tokens(model, length)
    ours = seconds(model, lambda: answer(model, ids[:-1], [ids[-1:]], max_new_tokens=1, stop_ids=()))
    model.set_attn_implementation("sdpa")
    batch = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    mask = torch.ones_like(batch)
    plain = seconds(
        model, lambda: model.generate(batch, attention_mask=mask, do_sample=False, max_new_tokens=1, pad_token_id=0)
    )
    model.set_attn_implementation(NAME)
    found = {
        "tokens": length,
        "chunk": min(length, chunk_len(model, length)),
        "tokens_per_second": length / ours,
        "share_of_ceiling": length / ours / CEILING,
        "generate_tokens_per_second": length / plain,
        "times_generate": plain / ours,
    }
    print(f"prefill of {length:,} tokens in chunks of {found['chunk']:,}: {length / ours:,.0f} tokens/s", end="")
    print(f" ({found['share_of_ceiling']:.0%} of the ceiling, {found['times_generate']:.2f} x plain generate)")
    return found


def questions(model: Any, length: int) -> dict[str, Any]:
    """One question on a context, and ten."""
    context = tokens(model, length)
    asked = [tokens(model, QUESTION + at, seed=at + 1) for at in range(QUESTIONS)]

    def ask(some: list[np.ndarray]) -> float:
        return seconds(model, lambda: answer(model, context, some, max_new_tokens=ANSWER, stop_ids=()))

    one, ten = ask(asked[:1]), ask(asked)
    print(f"{QUESTIONS} questions on {length:,} tokens: {ten:.2f} s, {ten / one:.2f} x one ({one:.2f} s)")
    return {"tokens": length, "answer_tokens": ANSWER, "one_s": one, "ten_s": ten, "times_one": ten / one}


def tokens(model: Any, count: int, seed: int = 0) -> np.ndarray:
    return rng_for(seed, "eval", count).integers(model.config.vocab_size, size=count).astype(np.uint32)


def seconds(model: Any, work: Callable[[], Any], repeats: int = 3) -> float:
    """The median, after one run to warm up."""
    times = []
    for _ in range(repeats + 1):
        _wait(model)
        began = time.perf_counter()
        work()
        _wait(model)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
