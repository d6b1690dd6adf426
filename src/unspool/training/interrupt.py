"""SIGTERM and Ctrl-C: the running step is finished and saved, then the run ends.

Promise: the first signal loses nothing; a second one ends the process at once, as if nobody listened.
The exit code is the shell's for that signal: 143 for SIGTERM (which Slurm sends before it takes a machine away),
130 for Ctrl-C.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(SystemExit):
    """A run that was asked to stop and did: no error, so no traceback and no `error:`; the sentence has been said."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Stop:
    """Whether somebody asked, and by which signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None


@contextmanager
def listen(name: str) -> Iterator[Stop]:
    """Collect signals inside; only in the main thread, since Python gives them to no other."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        stop.signal = signal.Signals(number)
        logger.warning(f"{name}: {stop.signal.name}: stopping after this step; a second one stops at once")

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
