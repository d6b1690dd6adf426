"""NVIDIA MPS: kernels of several processes run on one GPU at the same time, instead of in turns."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
# Paths of Unix sockets have at most 107 bytes. The daemon appends names of its own.
MAX_PIPE_PATH = 80
QUIT_SECONDS = 30


def find_control() -> str | None:
    found = shutil.which(CONTROL)
    if found is None:
        print(f"--mps: {CONTROL} is not on PATH, so the runs share the GPU in turns.", flush=True)
    return found


@contextmanager
def mps(control: str, out: Path) -> Iterator[None]:
    """Run the MPS daemon for processes that are started meanwhile. They go without if it does not start."""
    folder = out / "mps"
    logs = folder / "log"
    logs.mkdir(parents=True, exist_ok=True)
    pipes = folder / "pipe"
    short = None
    if len(os.fsencode(pipes)) > MAX_PIPE_PATH:
        short = tempfile.mkdtemp(prefix="mps-", dir="/tmp")  # the user's temporary folder may be as long
        pipes = Path(short)
    pipes.mkdir(exist_ok=True)
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    is_running = False
    try:
        is_running = _start(control, folder / "start.log")
        if not is_running:
            _restore(before)
        yield
    finally:
        if is_running:
            _quit(control)
        _restore(before)
        if short is not None:
            shutil.rmtree(short, ignore_errors=True)


def _start(control: str, log: Path) -> bool:
    """Start the daemon; also if one is left there from a run that was killed."""
    if _daemon_starts(control, log):
        return True
    _quit(control)
    if _daemon_starts(control, log):
        return True
    said = log.read_text(errors="replace").strip().splitlines()
    print(
        f"--mps: the daemon did not start ({said[-1] if said else 'no message'}), so the runs share the GPU in turns."
    )
    return False


def _daemon_starts(control: str, log: Path) -> bool:
    # A file, because the daemon would keep a pipe open.
    with log.open("wb") as file:
        done = subprocess.run(
            [control, "-d"], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, check=False
        )
    return done.returncode == 0


def _quit(control: str) -> None:
    try:
        subprocess.run(
            [control], input=b"quit\n", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
            timeout=QUIT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"--mps: the daemon did not end within {QUIT_SECONDS} s.", flush=True)


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
