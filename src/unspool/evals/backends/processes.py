"""One model in several processes, each on a GPU of its own where there are enough of them.

In: what a model's backend is made of, and how many processes. Out: a backend that answers as many prompts at a time.
Promise: every prompt gets the answer that one process would give it. A process that dies ends the run with a sentence
instead of being waited for, and none outlives the command, however that ends.
Price: the weights in each of them. Prompts are still made by one, the command itself.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from unspool.core.errors import UnspoolError
from unspool.core.logging import LOGGER, set_up_logging
from unspool.evals.backends.base import ModelBackend, Stretch
from unspool.evals.prompts import Prompt

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What every process is told."""

    ref: str
    device: torch.device
    dtype: torch.dtype
    stretch: Stretch | None
    planned_tokens: int
    threads: int  # on a CPU
    parent: int
    log_level: int  # 0: logging was not set up


class ProcessesBackend:
    """Answers `width` prompts at a time; its processes begin with the first prompts."""

    planned_tokens = 0

    def __init__(
        self, ref: str, *, device: torch.device, dtype: torch.dtype, width: int, stretch: Stretch | None = None
    ) -> None:
        self.ref, self.device, self.dtype, self.stretch, self.width = ref, device, dtype, stretch, width
        # Says how prompts are read and how they become words; its weights are never loaded.
        self._like = ModelBackend(ref, device=device, dtype=dtype, stretch=stretch)
        self._lock = threading.Lock()
        self._others = set(multiprocessing.active_children())
        self._children: list[Any] = []
        self._stopped = False

    @property
    def tokenizer(self) -> Any:
        return self._like.tokenizer

    @property
    def row_tokens(self) -> int:
        return self._like.row_tokens

    def answers(self, prompt: Prompt) -> list[str]:
        return self._ask(_answers, prompt)

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return self._ask(_window_losses, ids)

    def stop(self) -> None:
        """End all processes at once, whatever they are at; none begins any more."""
        with self._lock:
            self._stopped = True
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.join()

    def _ask(self, function: Callable[[Any], Result], given: Any) -> Result:
        try:
            with self._lock:
                if self._stopped:
                    raise BrokenProcessPool
                future = self._pool.submit(function, given)
                # Processes begin one by one, with prompts that find none idle.
                self._children = [child for child in multiprocessing.active_children() if child not in self._others]
            return future.result()
        except BrokenProcessPool:
            raise UnspoolError(
                f"one of {self.width} processes that answer prompts has ended without a word, perhaps for lack of "
                "memory: each holds the whole model. What was scored is kept; run the same command with fewer "
                "--processes."
            ) from None

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        # Not forked: this process has threads, and a fork could not use CUDA.
        context = multiprocessing.get_context("spawn")
        shared = Shared(
            ref=self.ref,
            device=self.device,
            dtype=self.dtype,
            stretch=self.stretch,
            planned_tokens=self.planned_tokens,
            threads=max(1, torch.get_num_threads() // self.width),
            parent=os.getpid(),
            log_level=LOGGER.level,
        )
        return ProcessPoolExecutor(
            self.width, mp_context=context, initializer=_begin, initargs=(shared, context.Value("i", 0))
        )


# In a process of its own


_backend: ModelBackend | None = None


def _begin(shared: Shared, turn: Any) -> None:
    global _backend
    # Ctrl-C reaches all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if shared.log_level:
        set_up_logging(shared.log_level)
    threading.Thread(target=_end_with, args=(shared.parent,), daemon=True).start()
    with turn.get_lock():
        number = turn.value
        turn.value += 1
    device = shared.device
    if device.type == "cuda":
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(shared.threads)
    _backend = ModelBackend(shared.ref, device=device, dtype=shared.dtype, stretch=shared.stretch)
    _backend.planned_tokens = shared.planned_tokens


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _answers(prompt: Prompt) -> list[str]:
    assert _backend is not None
    return _backend.answers(prompt)


def _window_losses(ids: np.ndarray) -> np.ndarray:
    assert _backend is not None
    return _backend.window_losses(ids)
