"""Benchmarks in processes of their own. Imports no torch."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Memory freed in one size can be used in another; and host memory is pinned by several threads, a second a GiB by one.
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def environment() -> dict[str, str]:
    """Of a process that runs this tree's code, installed or not."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}


def in_own_process(*arguments: str, seconds: float | None = None) -> dict[str, Any] | int:
    """Run a benchmark once more with other arguments: the last JSON line, or the code that it ended with.

    So that nothing of an attempt that failed is left for the next, and each has the whole memory. What else it prints
    is passed on. The system ends a process that takes too much host memory without a word of its own. A process that
    is not done after `seconds` is ended, and what it has printed counts.
    """
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill) if seconds is not None else None
        if timer is not None:
            timer.start()
        found: dict[str, Any] | None = None
        for line in process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
            else:
                print(line, end="", flush=True)
    stopped = timer is not None and timer.finished.is_set()
    if timer is not None:
        timer.cancel()
    if found is None or (process.returncode and not stopped):
        return process.returncode
    return found
