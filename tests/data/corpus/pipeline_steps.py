"""A step that worker processes can import and that does to each task what the test requires."""

import os
import signal
import time
from pathlib import Path

from datatrove.pipeline.base import PipelineStep

from unspool.core.errors import DataError


class Write(PipelineStep):
    """Task r writes `out-r.txt`, after `does[r]`: fail, divide, die or sleep."""

    name = "out"
    type = "WRITER"

    def __init__(self, folder: Path, does: dict[int, str] | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.does = does or {}

    def run(self, data=None, rank=0, world_size=1) -> None:
        with (self.folder / "ran").open("a") as file:
            file.write(f"{rank} {os.getpid()} {os.environ.get('TOKENIZERS_PARALLELISM')}\n")
        self.stat_update("tasks")
        match self.does.get(rank):
            case "fail":
                raise DataError(f"file-{rank}.jsonl, line 7: broken.")
            case "divide":
                rank // 0
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                (self.folder / f"sleeping-{rank}").write_text(str(os.getpid()))
                time.sleep(1200)  # until it is ended
        aside = self.folder / f"out-{rank:05d}.tmp"
        aside.write_text(f"task {rank} of {world_size}\n")
        aside.replace(self.folder / f"out-{rank:05d}.txt")


def outputs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("out-*.txt"))}


def ran(folder: Path) -> list[list[str]]:
    """Rank, process and environment of every task that began; forgotten afterwards."""
    path = folder / "ran"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.split() for line in lines]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    # A process that has ended stays listed until its parent has taken note.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # which has happened just now
        return False


def wait_until(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)
