"""`unspool` commands on several ranks of this machine: forked, so that nothing is imported again."""

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from unspool.cli.main import build_app

SECONDS = 300


def run_command(
    args: Callable[[int], list[str]],
    *,
    world_size: int,
    folder: Path,
    env: dict[str, str] | None = None,
    before: Callable[[int], None] = lambda rank: None,
) -> list[tuple[int, str]]:
    """Exit code and output of every rank of one job; `before` changes the process of a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    sys.stderr.flush()
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | (env or {})
    children = [
        _fork(args(rank), folder / f"rank-{rank}.log", shared | {"RANK": str(rank)}, lambda rank=rank: before(rank))
        for rank in range(world_size)
    ]
    until, codes = time.monotonic() + SECONDS, {}
    while len(codes) < world_size and time.monotonic() < until:
        for child in set(children) - codes.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for child in set(children) - codes.keys():
        os.kill(child, 9)
        os.waitpid(child, 0)
    return [(codes.get(child, -9), (folder / f"rank-{rank}.log").read_text()) for rank, child in enumerate(children)]


def _fork(args: list[str], log: Path, env: dict[str, str], before: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            os.environ.update(env)
            os.environ.setdefault("LOCAL_RANK", env["RANK"])
            torch.set_num_threads(1)
            before()
            try:
                build_app()(args)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            file.flush()
    finally:
        # Not sys.exit: nothing of pytest may run twice.
        os._exit(code)
