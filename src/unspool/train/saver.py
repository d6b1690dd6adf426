"""Writing checkpoints while training goes on.

In: the tensors of a step, on any device. Out: checkpoint folders (checkpoint.py), written by a thread.
Promise: the state of that step is what is written, however far training has come since; at most one is being written.
A full disk costs the new checkpoint, never an older one, and does not end the stage.
Price: a second copy of the tensors in host memory, pinned where they come from a GPU.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from unspool.base.progress import say
from unspool.train.checkpoint import checkpoints, write_checkpoint

# Below this nobody notices a wait.
SHORT_S = 1.0


class Saver:
    """Leaving its block waits for the checkpoint that is being written."""

    def __init__(self, folder: Path, *, stage: str, pin: bool) -> None:
        self._folder, self._stage = folder, stage
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
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
            self._copies[name].copy_(tensor.detach(), non_blocking=self._pin)
        if self._pin:
            torch.cuda.synchronize()
        return {name: self._copies[name] for name in tensors}

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong and was not foreseen."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any], files: dict[str, bytes]) -> None:
        try:
            write_checkpoint(self._folder, tensors, facts, files)
        except OSError as error:
            last = checkpoints(self._folder)
            there = f"{last[-1].name} is there" if last else "there is none yet"
            say(
                f"stage {self._stage}: the checkpoint of step {facts['step']} could not be written "
                f"({error.strerror or error}); {there}, and training goes on: the next one will be tried as usual"
            )
