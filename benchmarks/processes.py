"""Run benchmarks in separate processes. Does not import torch."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Freed memory is reusable for other sizes. Several threads pin host memory; one thread takes a second per GiB.
ALLOCATOR = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"


def environment() -> dict[str, str]:
    """Environment of a process that imports this tree's code, installed or not."""
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTORCH_CUDA_ALLOC_CONF": ALLOCATOR}


def in_own_process(*arguments: str, seconds: float | None = None) -> dict[str, Any] | int:
    """Run a benchmark in a new process with other arguments; return its last JSON line, or its exit code.

    A new process has all memory, and nothing of a failed attempt remains. Other output is passed on. The operating
    system kills a process that takes too much host memory, without a message. A process that runs longer than
    `seconds` is killed, and the lines that it printed count.
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
