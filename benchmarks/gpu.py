"""Timing, peak memory and machine description for the GPU benchmarks."""

import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def require_gpu() -> None:
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device; none was found.", file=sys.stderr)
        raise SystemExit(2)


def milliseconds(work: Callable[[], Any], *, repeats: int = 5, warmup: int = 2) -> float:
    """Median time on the device, after warm-up."""
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def peak_gib(work: Callable[[], Any]) -> float:
    """Peak memory that `work` allocates, its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def machine() -> dict[str, Any]:
    packages = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        **packages,
    }


def save(name: str, results: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
