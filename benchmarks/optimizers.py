"""Time of the optimizer update of an 8B model on one GPU, by mode.

    python benchmarks/optimizers.py [--layers 32] [--save]

Llama-3-8B's parameters with random gradients, without a model. Other scripts call `time_update`. The limit is memory
bandwidth: bytes that an update reads and writes ÷ the bandwidth of a plain copy, which is measured first. fp32 master
weights with fp32 moments take 18 bytes per parameter, so fewer layers are used if they do not fit.
`--dry`, or a machine without a GPU, runs a toy model through the same code.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from unspool.training.optim.adamw import AdamW
from unspool.training.optim.base import ParamState, Rates

RESULTS = Path(__file__).parent / "results" / "optimizers.json"
MODES = [(weights, states) for weights in ("fp32", "bf16") for states in ("fp32", "8bit")]
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14_336, 4096)] * 3, (4096,), (4096,)]
ENDS = [(128_256, 4096), (4096,), (128_256, 4096)]
TOY_LAYER, TOY_ENDS = [(64, 64), (64,)], [(300, 64)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/optimizers.json")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    dry = given.dry or not torch.cuda.is_available()
    device = torch.device("cpu" if dry else "cuda")
    if dry and not given.dry:
        print("no GPU: running a toy model")
    bandwidth = 0.0 if dry else copy_bandwidth(device)
    results = []
    for weights, states in MODES:
        result = time_update(weights, states, layers=2 if dry else given.layers, device=device, toy=dry)
        results.append(result)
        bound = f", {result['bytes_moved'] / bandwidth * 1e3:.0f} ms at the speed of a copy" if bandwidth else ""
        print(
            f"weights {weights}, states {states}: {result['parameters'] / 1e9:.2f}B parameters in "
            f"{result['seconds'] * 1e3:.1f} ms{bound}; {result['gib']:.1f} GiB held"
        )
    if given.save and not dry:
        RESULTS.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=2) + "\n")


def time_update(
    weights: str, states: str, *, layers: int, device: torch.device, toy: bool = False, repeats: int = 5
) -> dict[str, float | str]:
    """Median seconds of one update of all parameters after warm-up, with as many layers as fit."""
    shapes = (TOY_ENDS if toy else ENDS) + (TOY_LAYER if toy else LAYER) * layers
    if device.type == "cuda":
        shapes = _fitting(shapes, 12 if weights == "bf16" else 18, torch.cuda.mem_get_info(device)[0] * 0.9)
    in_bf16 = device.type == "cuda" or weights == "bf16"
    optimizer = AdamW(in_8bit=states == "8bit")
    params = [_parameter(number, shape, weights, in_bf16, device) for number, shape in enumerate(shapes)]
    for param in params:
        param.state = optimizer.init_state(param)
        grad = torch.randn(param.weight.shape, device=device, dtype=torch.bfloat16)
        param.grad = grad.float() if optimizer.takes_fp32_grad(param) else grad
    rates = Rates(lr=1e-5, betas=(0.9, 0.95), seed=0, scale=1.0)
    seconds = []
    for _ in range(repeats + 1):
        _wait(device)
        began = time.perf_counter()
        optimizer.step(params, rates)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    parameters = sum(param.weight.numel() for param in params)
    moved = sum(_bytes(optimizer, param) for param in params)
    return {
        "weights": weights,
        "states": states,
        "parameters": parameters,
        "seconds": sorted(seconds[1:])[repeats // 2],
        "bytes_moved": moved,
        "gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
    }


def copy_bandwidth(device: torch.device) -> float:
    """Copy bandwidth in bytes per second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return 2 * len(source) / min(seconds)


def _parameter(number: int, shape: tuple[int, ...], weights: str, in_bf16: bool, device: torch.device) -> ParamState:
    weight = torch.zeros(shape, device=device, dtype=torch.bfloat16 if weights == "bf16" else torch.float32)
    computed = weight.to(torch.bfloat16) if in_bf16 and weights == "fp32" else None
    return ParamState(
        name=f"parameter {number}", weight=weight, bf16_copy=computed, weight_decay=0.1 * (len(shape) > 1)
    )


def _fitting(shapes: list[tuple[int, ...]], per_parameter: int, room: float) -> list[tuple[int, ...]]:
    kept, used = [], 0
    for shape in shapes:
        used += torch.Size(shape).numel() * per_parameter
        if used > room:
            break
        kept.append(shape)
    return kept


def _bytes(optimizer: AdamW, param: ParamState) -> int:
    """Bytes per parameter: weight and moments read and written, gradient read, bf16 copy written."""
    both = [param.weight, *(tensor for tensor in optimizer.state_tensors(param).values() if tensor.dim())]
    once = [tensor for tensor in (param.grad, param.bf16_copy) if tensor is not None]
    return sum(2 * part.numel() * part.element_size() for part in both) + sum(
        part.numel() * part.element_size() for part in once
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
