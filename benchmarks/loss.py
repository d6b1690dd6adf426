"""Time and memory of head and cross-entropy in bf16: ours, Liger's, torch's and plain logits.

    python benchmarks/loss.py [--tokens 64K] [--words 128256] [--hidden 4096] [--save]

Forward and backward, gradients of hidden states and of the weight. Liger is measured if `liger_kernel` can be
imported; it is pure Python: `pip download --no-deps liger-kernel`, unzip the wheel, add the folder to PYTHONPATH.
torch's is `F.linear_cross_entropy`, from 2.13 on. Plain logits are measured on fewer tokens, and the output says so.
Without a GPU it exits with code 2.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu import machine, milliseconds, peak_gib, require_gpu, save
from torch import Tensor

from unspool.core.sizes import parse_size
from unspool.models.loss import summed_loss

PLAIN_TOKENS = 4096
GOAL_GIB, GOAL_RATIO = 3.0, 1.15
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=parse_size, default=64 << 10)
    parser.add_argument("--words", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--save", action="store_true", help="write results/loss.json")
    args = parser.parse_args()
    require_gpu()
    print(machine())
    torch.manual_seed(0)
    weight = torch.randn(args.words, args.hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    lines = []
    for name, loss in ways().items():
        tokens = min(args.tokens, PLAIN_TOKENS) if name == "plain" else args.tokens
        lines.append(measure(name, loss, tokens, weight))
    found = {line["name"]: line for line in lines}
    ours = found["ours"]
    verdict: dict[str, Any] = {"peak_gib": ours["peak_gib"], "goal_gib": GOAL_GIB}
    print(f"ours: peak {ours['peak_gib']:.2f} GiB (goal: under {GOAL_GIB})")
    for peer in ("liger", "torch"):
        if found.get(peer, {}).get("ms"):
            verdict[f"over_{peer}"] = ours["ms"] / found[peer]["ms"]
            print(f"ours / {peer}: {verdict[f'over_{peer}']:.3f} of its time (goal for liger: at most {GOAL_RATIO})")
    if args.save:
        save("loss.json", {"words": args.words, "hidden": args.hidden, "ways": lines, "verdict": verdict})


def ways() -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "ours": lambda hidden, weight, labels: summed_loss(hidden, weight, labels, num_valid=len(labels))[0],
        "plain": lambda hidden, weight, labels: F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum"),
    }
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError as error:
        print(f"liger: not measured ({error})")
    else:
        # Bias and class weights, then ignored label, z-loss, smoothing and reduction.
        found["liger"] = lambda hidden, weight, labels: Liger.apply(
            hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum"
        )[0]
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["torch"] = lambda hidden, weight, labels: F.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", options=options
        )
    else:
        print("torch: not measured (F.linear_cross_entropy needs torch 2.13)")
    return found


def measure(name: str, loss: Loss, tokens: int, weight: Tensor) -> dict[str, Any]:
    hidden = torch.randn(tokens, weight.shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(len(weight), (tokens,), device="cuda")

    def work() -> None:
        hidden.grad = weight.grad = None
        loss(hidden, weight, labels).backward()

    line: dict[str, Any] = {"name": name, "tokens": tokens, "ms": None, "peak_gib": None}
    try:
        line["ms"] = milliseconds(work)
        hidden.grad = weight.grad = None
        line["peak_gib"] = peak_gib(work)
    except (RuntimeError, TypeError) as error:
        print(f"{name}: {str(error).splitlines()[0]}")
        return line
    flop = 6 * tokens * weight.numel()
    print(
        f"{name:8}{tokens:>8} tokens {line['ms']:9.1f} ms {flop / line['ms'] / 1e9:7.0f} TFLOP/s "
        f"{line['peak_gib']:6.2f} GiB",
        flush=True,
    )
    return line


if __name__ == "__main__":
    main()
