"""Time by phase, in seconds."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Phases:
    """`with phases("load"): …` adds to the seconds of a phase. Phases keep the order in which they began."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began = clock, clock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._clock()
        self.add(name, 0.0)
        try:
            yield
        finally:
            self.add(name, self._clock() - began)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_before(self, name: str, seconds: float) -> None:
        """Add a phase that ended before this object was created."""
        self.seconds = {name: seconds} | self.seconds
        self._began -= seconds

    def rounded(self) -> dict[str, float]:
        """Seconds by phase and in total, for JSON."""
        return {name: round(seconds, 2) for name, seconds in self.seconds.items()} | {"total": round(self._total(), 2)}

    def text(self) -> str:
        """Format as `12.3 s (load 3.1, first step 8.0, other 1.2)`."""
        total = self._total()
        shown = self.seconds | {"other": total - sum(self.seconds.values())}
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in shown.items() if seconds >= 0.05)
        return f"{total:.1f} s ({parts})" if parts else f"{total:.1f} s"

    def _total(self) -> float:
        return self._clock() - self._began


def process_seconds() -> float | None:
    """Return seconds since this process was started; None if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
