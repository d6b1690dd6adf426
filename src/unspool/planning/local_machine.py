"""Local devices for `plan`: the GPU, or the CPU with measured rates."""

import os
import time
from collections.abc import Callable

from unspool.core.environment import cpu_name, gpus
from unspool.core.errors import ConfigError
from unspool.core.host_memory import measure_host_memory
from unspool.planning.cost import GIB, Gpu, match_gpu

CPU, THIS = "cpu", "this"  # values of --gpu
_WIDTH = 1024  # width of the multiplied matrices
_COPIED = 64 << 20  # bytes, beyond any cache
_SECONDS = 0.4  # for each rate


def local_gpu() -> Gpu | None:
    """Return the local GPU; None without one; ConfigError if its rates are not known."""
    found = gpus()
    if not found:
        return None
    gpu = match_gpu(found[0]["name"], float(found[0]["memory_bytes"]))
    if gpu is None:
        raise ConfigError(f"the local GPU, {found[0]['name']}, is not known; pass a similar GPU with `gpu`.")
    return gpu


def local_cpu() -> Gpu:
    """Measure this machine's CPU and memory; takes a second."""
    import torch

    threads = torch.get_num_threads()
    matrix, numbers = torch.ones(_WIDTH, _WIDTH), torch.ones(_COPIED // 4)
    other = torch.empty_like(numbers)
    product = _seconds(lambda: matrix @ matrix)
    copy = _seconds(lambda: other.copy_(numbers))
    return Gpu(
        name=CPU,
        title=f"CPU ({cpu_name()}, {threads} thread{'s' * (threads > 1)})",
        gib=_memory() / GIB,
        tflops=2 * _WIDTH**3 / product / 1e12,
        bandwidth=2 * _COPIED / copy / 1e12,
        link=0,
        host=2 * _COPIED / copy / 1e9,
        is_cpu=True,
    )


def _memory() -> float:
    """Return the bytes of memory of this machine or container."""
    found = measure_host_memory()
    # Outside Linux, use POSIX.
    return float(found.total if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _seconds(work: Callable[[], object]) -> float:
    """Return median seconds of one call: the mean would include other programs, the minimum is too optimistic."""
    work()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
