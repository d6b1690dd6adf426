"""Local ranks that wait for requests: started once, since each takes seconds to import torch.

In: how many, on which device. Out: what rank 0 answers. Ranks that share a GPU talk by gloo.
Promise: a rank that fails, or that does not answer in time, ends all of them, and its last words are in the error.
Run by itself it is a rank: `python -m unspool.verification.rank_processes FOLDER RANK WORLD_SIZE DEVICE`.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unspool.training.parallel.ranks import RankEnv, pick_backend
from unspool.verification.results import error_line
from unspool.verification.splits import answer

SECONDS = 300
DONE = "done\n"


class RankProcesses(AbstractContextManager["RankProcesses"]):
    """`with RankProcesses(2) as ranks: ranks.answers(…)`"""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._scratch = tempfile.TemporaryDirectory()
        self._children: list[subprocess.Popen[str]] = []
        self._device = ""

    def answers(self, request: dict[str, Any]) -> dict[str, tuple[float, dict[str, Tensor]]]:
        if request["device"] != self._device:
            self._end()
            self._start(request["device"])
        try:
            for child in self._children:
                assert child.stdin is not None
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            self._wait()
        except (BrokenPipeError, TimeoutError) as error:
            said = self._last_words()
            self._end()
            raise RuntimeError(said or str(error)) from None
        answered: dict[str, tuple[float, dict[str, Tensor]]] = torch.load(self._folder / "answer", weights_only=True)
        return answered

    @property
    def _folder(self) -> Path:
        return Path(self._scratch.name)

    def _start(self, device: str) -> None:
        self._device = device
        (self._folder / "store").unlink(missing_ok=True)
        for rank in range(self.world_size):
            command = [sys.executable, "-m", __spec__.name, str(self._folder), str(rank), str(self.world_size), device]
            with (self._folder / f"errors-{rank}").open("w") as errors:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            self._children.append(child)

    def _wait(self) -> None:
        """For a line of every rank; the first that ends instead ends the wait."""
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                assert child.stdout is not None
                selector.register(child.stdout, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(timeout=SECONDS)
                if not ready:
                    raise TimeoutError(f"ranks did not answer within {SECONDS} s")
                for key, _ in ready:
                    # Gloo greets its peers on the same channel.
                    while (line := key.fileobj.readline()) != DONE:  # type: ignore[union-attr]
                        if not line:
                            raise BrokenPipeError("a rank has ended")
                    selector.unregister(key.fileobj)

    def _last_words(self) -> str:
        """Of ranks that ended by themselves: the first error that is not about a lost connection, else the signals."""
        ended = []
        for rank, child in enumerate(self._children):
            try:
                code = child.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            said = error_line((self._folder / f"errors-{rank}").read_text())
            # A rank may be ended because another was, so what any of them said comes first.
            if code < 0:
                last = f", its last words: {said}" if said else ""
                ended.append(f"rank {rank} was ended by {signal.Signals(-code).name}{last}")
            elif said and "onnection" not in said:
                return f"rank {rank}: {said}"
        return "; ".join(ended)

    def _end(self) -> None:
        for child in self._children:
            child.kill()
            child.communicate()
        self._children, self._device = [], ""

    def __exit__(self, *_: object) -> None:
        self._end()
        self._scratch.cleanup()


def main() -> None:
    folder, rank, world_size, device_type = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    rank_env = RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        host="",
        port=0,
        agent_hosts_store=False,
    )
    device, backend = pick_backend(device_type, rank_env, num_devices=torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    for line in sys.stdin:
        found = answer(json.loads(line), world_size=world_size)
        if rank == 0:
            torch.save(found, folder / "answer")
        print(DONE, end="", flush=True)


if __name__ == "__main__":
    main()
