"""Several ranks on this machine: forked, so that nothing is imported again, and meeting through a file."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# Of all ranks together; far beyond what they need, so that only ranks that wait for each other reach it.
SECONDS = 600


def run_ranks(work: Callable[[int], None], *, world_size: int, store: Path) -> None:
    """`work(rank)` in so many processes that can reach each other; fails if one of them does, or does not end."""
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot fork; run this test by itself")
    sys.stdout.flush()
    sys.stderr.flush()
    children = [_fork(work, rank, world_size, store) for rank in range(world_size)]
    codes: dict[int, int] = {}
    until = time.monotonic() + SECONDS
    while len(codes) < world_size and time.monotonic() < until and not any(codes.values()):
        for child in set(children) - codes.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in set(children) - codes.keys():
        os.kill(child, 9)
        os.waitpid(child, 0)
    failed = [rank for rank, child in enumerate(children) if codes.get(child) not in (0, None)]
    messages = [path.read_text() for path in sorted(store.parent.glob(f"{store.name}.error-*"))]
    assert not failed, f"ranks {failed} failed:\n" + "\n".join(messages)
    assert len(codes) == world_size, f"the ranks did not end within {SECONDS} s"


def _fork(work: Callable[[int], None], rank: int, world_size: int, store: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        work(rank)
        # Nobody leaves while another still waits for an answer.
        dist.barrier()
        code = 0
    except BaseException:
        store.with_name(f"{store.name}.error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        # Not sys.exit: nothing of pytest may run twice.
        os._exit(code)
