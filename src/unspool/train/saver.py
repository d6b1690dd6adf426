"""Writing checkpoints while training goes on.

In: the tensors of a step, on any device. Out: checkpoint folders (checkpoint.py), written by a thread.
Promise: the state of that step is what is written, however far training has come since; at most one is being written.
Several ranks write theirs at the same time, and talk about it in a group of their own, beside that of training.
A full disk costs the new checkpoint, never an older one, and does not end the stage.
Price: a second copy of the tensors in host memory, pinned where they come from a GPU.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from unspool.base.progress import say
from unspool.train.checkpoint import checkpoints, write_checkpoint
from unspool.train.divided import as_part, own_part

# Of one exchange between ranks, while some may still be writing.
LIMIT = timedelta(hours=2)
# Below this nobody notices a wait.
SHORT_S = 1.0


class Saver:
    """Leaving its block waits for the checkpoint that is being written. `world_size` ranks build one each."""

    def __init__(self, folder: Path, *, stage: str, pin: bool, world_size: int = 1) -> None:
        self._folder, self._stage = folder, stage
        # By gloo: what is written lies in host memory.
        self._group: Any = dist.new_group(backend="gloo", timeout=LIMIT) if world_size > 1 else None
        self._pool = ThreadPoolExecutor(1, "unspool-checkpoint")
        self._pin = pin
        # Kept from one checkpoint to the next: pinning memory takes longer than copying into it.
        self._copies: dict[str, Tensor] = {}
        self._writing: Future[None] | None = None
        self._step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        if self._group is not None and kind is None:
            dist.destroy_process_group(self._group)

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Copy the state and return; it is written meanwhile. Waits for an earlier one that is not done yet."""
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began
        if waited > SHORT_S:
            say(
                f"stage {self._stage}: step {facts['step']} waited {waited:.0f} s for the checkpoint of step "
                f"{self._step} to be written; a larger checkpoint_every or a faster disk avoids that"
            )
        self._step = int(facts["step"])
        self._writing = self._pool.submit(self._write, self._copy(tensors), dict(facts), dict(files))

    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In host memory. By our own few lines, since torch 2.11's stager fails at its second checkpoint."""
        for name, tensor in tensors.items():
            part, copy = own_part(tensor), self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (part.shape, part.dtype):
                self._copies[name] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pin)
            self._copies[name].copy_(part, non_blocking=self._pin)
        if self._pin:
            torch.cuda.synchronize()
        return {name: as_part(self._copies[name], tensor) for name, tensor in tensors.items()}

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong and was not foreseen."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any], files: dict[str, bytes]) -> None:
        try:
            write_checkpoint(self._folder, tensors, facts, files, self._group)
        except OSError as error:
            last = checkpoints(self._folder)
            there = f"{last[-1].name} is there" if last else "there is none yet"
            say(
                f"stage {self._stage}: the checkpoint of step {facts['step']} could not be written "
                f"({error.strerror or error}); {there}, and training goes on: the next one will be tried as usual"
            )
