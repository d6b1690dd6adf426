"""Learning rate, spike guard and stop signals: the decisions about a step before and after it runs."""

import logging
import math
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any

from unspool.training.config import GuardConfig, StageConfig

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def learning_rate(stage: StageConfig, step: int) -> float:
    """Return the learning rate of step 1 … `stage.steps`: linear warm-up, then `stage.schedule`.

    The last step has `min_lr_ratio` × `lr`, unless the whole stage is warm-up.
    """
    warmup_steps = int(stage.warmup_ratio * stage.steps)
    if step <= warmup_steps:
        return stage.lr * step / warmup_steps
    done = (step - warmup_steps) / max(1, stage.steps - warmup_steps)
    decay = 1 - done if stage.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return stage.lr * (stage.min_lr_ratio + (1 - stage.min_lr_ratio) * decay)


class SpikeGuard:
    """Finds bad steps: a loss or gradient that is not finite, or far above the median of recent steps.

    A refused step changes no weight. `state` goes into checkpoints, so that a resumed run refuses the same steps.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._skipped = 0

    def allows(self, loss: float) -> bool:
        return loss <= self._limit(self._losses, self.config.factor)

    @property
    def max_norm(self) -> float:
        return self._limit(self._norms, self.config.grad_factor)

    def find_problem(self, loss: float, grad_norm: float) -> str | None:
        """Return why this step must not change weights; None for a good step. Agrees with `allows` and `max_norm`."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "the loss or gradient is not finite"
        if not self.allows(loss):
            return _spike("loss", loss, self.config.factor, self._losses)
        if grad_norm > self.max_norm:
            return _spike("gradient norm", grad_norm, self.config.grad_factor, self._norms)
        return None

    def record(self, loss: float, grad_norm: float, problem: str | None) -> bool:
        """Record a step and its problem; return whether the stage may continue."""
        if problem is None:
            self._losses.append(loss)
            self._norms.append(grad_norm)
            self._skipped = 0
            return True
        self._skipped += 1
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        policy = self.config.spike if is_finite else self.config.nan
        return policy == "skip" and self._skipped < self.config.most_skips

    @property
    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "norms": list(self._norms), "skipped": self._skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self._skipped = state["skipped"]

    def _limit(self, recent: deque[float], factor: float) -> float:
        if self.config.spike == "off" or len(recent) < self.config.window:
            return math.inf
        return factor * median(recent)


def _spike(what: str, value: float, factor: float, recent: deque[float]) -> str:
    usual = median(recent)
    return f"its {what} of {value:.4g} is above {factor:g} × {usual:.4g}, the median of the last {len(recent)} steps"


class StoppedError(SystemExit):
    """The run stopped on request and has reported it. Not an error, so there is no traceback."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class StopRequest:
    """The stop signal that this run has received, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None


@contextmanager
def catch_stop_signals(name: str, *, ranks: int = 1) -> Iterator[StopRequest]:
    """Inside the context, the first SIGTERM or Ctrl-C only sets `signal`, so that the step can be finished and saved.

    A second signal ends the process at once, except SIGTERM in a job of several `ranks`. There, Slurm sends it to every
    process, and torchrun sends it to its ranks again. Works only in the main thread, where Python delivers signals.
    Exit codes follow the shell: 143 for SIGTERM (which Slurm sends before it preempts a job), 130 for Ctrl-C.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            if not repeats(number):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        stop.signal = signal.Signals(number)
        at_once = "" if repeats(number) else "; send it again to stop at once"
        logger.warning(f"{name}: {stop.signal.name}: stopping after this step{at_once}")

    def repeats(number: int) -> bool:
        return ranks > 1 and number == signal.SIGTERM

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
