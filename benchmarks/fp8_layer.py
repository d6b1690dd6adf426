"""What FP8 gains in the linear layers of one transformer layer: forward, all gradients, all casts.

    python benchmarks/fp8_layer.py [--tokens 64K 8K] [--save]

bf16: `F.linear`, as in training. FP8: the products of `precision: fp8` (src/unspool/models/fp8). "casts" is the part of
FP8's time in which nothing is multiplied, "maxima" the part of the casts in which largest values are found. Errors are
relative to bf16 on random data, so they say nothing about training. The shape is that of Llama-3-8B. `--small` is a
tiny shape on a CPU.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu import machine, milliseconds, require_gpu, save
from torch import Tensor

from unspool.core.sizes import format_count, parse_size
from unspool.models.fp8.linear import products
from unspool.models.fp8.operands import largest_value, round_gradients, round_to_fp8

# Inputs of the linear layers, and the outputs of those that share an input.
LAYER = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate-up": (4096, (14_336,) * 2),
    "down": (14_336, (4096,)),
}
SMALL = {"qkv": (64, (64, 16, 16)), "o": (64, (64,)), "gate-up": (64, (128, 128)), "down": (128, (64,))}
GOAL = 1.6  # of bf16's speed at 64K
Way = Callable[..., tuple[Tensor, ...]]


def plain(hidden: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(hidden, weight) for weight in weights)


def fp8(hidden: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return products(hidden, weights)


WAYS: dict[str, Way] = {"bf16": plain, "fp8": fp8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=parse_size, default=[64 << 10, 8 << 10])
    parser.add_argument("--save", action="store_true", help="write results/fp8_layer.json")
    parser.add_argument("--small", action="store_true", help="a tiny shape on a CPU")
    args = parser.parse_args()
    if not args.small:
        require_gpu()
        print(machine())
    lines = []
    for tokens in [256] if args.small else args.tokens:
        line = measure(tokens, SMALL if args.small else LAYER, "cpu" if args.small else "cuda")
        print(describe(line), flush=True)
        lines.append(line)
    if args.save:
        save("fp8_layer.json", {"goal_at_64K": GOAL, "layers": lines})


def measure(tokens: int, layer: dict[str, tuple[int, tuple[int, ...]]], device: str) -> dict[str, Any]:
    clock = milliseconds if device == "cuda" else wall
    line: dict[str, Any] = {"tokens": tokens, "parts": {}}
    for name, (width, outputs) in layer.items():
        hidden, weights, grads = random_part(tokens, width, outputs, device)
        part = (hidden, weights, grads)
        found = {way: clock(partial(run, WAYS[way], *part)) for way in (*WAYS, *reversed(WAYS))}
        found |= {"casts": clock(partial(casts, *part)), "maxima": clock(partial(maxima, *part))}
        line["parts"][name] = {key: round(value, 3) for key, value in found.items()}
        line.setdefault("errors", {})[name] = errors(*part)
        del hidden, weights, grads, part
    line["milliseconds"] = {
        key: round(sum(part[key] for part in line["parts"].values()), 2) for key in (*WAYS, "casts", "maxima")
    }
    line["fp8_to_bf16"] = round(line["milliseconds"]["bf16"] / line["milliseconds"]["fp8"], 3)
    return line


def random_part(
    tokens: int, width: int, outputs: tuple[int, ...], device: str
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(std=std, generator=generator)

    hidden = normal(1, tokens, width).requires_grad_()
    weights = tuple(normal(size, width, std=0.02).requires_grad_() for size in outputs)
    return hidden, weights, tuple(normal(1, tokens, size, std=1e-3) for size in outputs)


def run(way: Way, hidden: Tensor, weights: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = way(hidden, *weights)
    return (*out, *torch.autograd.grad(out, (hidden, *weights), grads))


@torch.no_grad()
def casts(hidden: Tensor, weights: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    round_to_fp8((hidden[0],))
    weight = round_to_fp8(weights, columns=False)
    gradients = round_gradients(tuple(grad[0] for grad in grads), rows=True, columns=True)
    round_to_fp8(weights, rows=False, amax=weight.amax, divisors=gradients.divisors)


@torch.no_grad()
def maxima(hidden: Tensor, weights: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
    """The part of the casts that the scales of an earlier step would save."""
    for matrices in ((hidden[0],), weights, tuple(grad[0] for grad in grads)):
        largest_value(matrices)


def errors(hidden: Tensor, weights: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> dict[str, list[float]]:
    """Relative errors of outputs, the input's gradient and the weights' gradients."""
    exact = run(plain, hidden, weights, grads)
    return {
        way: [round(relative(*pair), 4) for pair in zip(run(WAYS[way], hidden, weights, grads), exact, strict=True)]
        for way in WAYS
        if way != "bf16"
    }


def relative(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().float(), exact.detach().float()
    return float((found - exact).norm() / exact.norm())


def wall(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def describe(line: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in line["milliseconds"].items())
    worst = max(max(values) for part in line["errors"].values() for values in part.values())
    return (
        f"{format_count(line['tokens'])} tokens: {times}; FP8 is {line['fp8_to_bf16']:.2f} times as fast as bf16 (goal "
        f"at 64K: {GOAL}); largest relative error {worst:.1%}"
    )


if __name__ == "__main__":
    main()
