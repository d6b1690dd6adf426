"""How fast a stage goes: tokens a second, MFU, memory, and the time that is left.

In: the seconds and documents of each step. Out: numbers for `metrics.jsonl`, and one short line for people.
Promise: what is shown is the mean of the last steps; what is not known (MFU on a CPU) is not shown.
"""

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from unspool.base.sizes import format_count
from unspool.train.flops import FlopCount

LAST_STEPS = 20
GIB = 1 << 30


@dataclass(frozen=True)
class Speed:
    """Of the operations that all `devices` could do in a second (`peak` each), how many a step did."""

    count: FlopCount | None = None
    peak: float | None = None
    devices: int = 1

    def mfu(self, doc_lens: Sequence[int], seconds: float) -> float | None:
        if self.count is None or self.peak is None:
            return None
        return self.count.step(doc_lens) / (seconds * self.peak * self.devices)


@dataclass
class Meter:
    """The last steps of a stage."""

    steps: int
    batch: int  # tokens of a step
    clock: Callable[[], float] = time.perf_counter
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    _mfus: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=LAST_STEPS + 1))

    def add(self, seconds: float, mfu: float | None) -> None:
        self._seconds.append(seconds)
        self._ends.append(self.clock())
        if mfu is not None:
            self._mfus.append(mfu)

    def note(self, step: int, loss: float, memory_gib: float) -> str:
        """What matters most stands first: a narrow terminal cuts the rest."""
        tokens_per_second = self.batch * len(self._seconds) / sum(self._seconds)
        parts = [f"loss {loss:.3f}", f"eta {_clock_text(self.seconds_left(step))}"]
        parts.append(f"{format_count(tokens_per_second)} tok/s")
        if self._mfus:
            parts.append(f"MFU {100 * sum(self._mfus) / len(self._mfus):.0f}%")
        return "  ".join([*parts, f"{memory_gib:.1f} GiB"])

    def seconds_left(self, step: int) -> float:
        """By the clock on the wall, so that checkpoints and validation are in it."""
        pace = self._seconds[-1]
        if len(self._ends) > 1:
            pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace * (self.steps - step)


def peak_memory_gib(device: torch.device) -> float:
    """The most that this process has held so far: on the GPU, or in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes, except on a Mac.
    return held / GIB if sys.platform == "darwin" else held * 1024 / GIB


def _clock_text(seconds: float) -> str:
    """1:02:33"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
