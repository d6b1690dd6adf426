"""What happens to a step that goes wrong: a loss or gradient that is not a number, or one far above the usual.

In: each step's loss and gradient norm, before the update. Out: None (go on), or what is wrong with the step.
Promise: a step that is refused changes no weight; the same steps are refused however often a run is resumed, since
what the guard remembers is kept with each checkpoint.
"""

import math
from collections import deque
from statistics import median
from typing import Any, Literal

from pydantic import Field

from unspool.core.config import Config


class GuardConfig(Config):
    """What to do about a step that goes wrong. Skipped: its rows are passed over, no weight changes."""

    nan: Literal["stop", "skip"] = Field("stop", description="a loss or gradient that is not a number")
    spike: Literal["off", "stop", "skip"] = Field("off", description="a loss or gradient far above the usual")
    factor: float = Field(2.0, gt=1, description="a loss above so many times the median of the window is a spike")
    grad_factor: float = Field(10.0, gt=1, description="a gradient norm above so many times its median is a spike")
    window: int = Field(64, ge=2, description="good steps that are remembered; before so many nothing is a spike")
    most_skips: int = Field(10, ge=1, description="so many skipped steps in a row stop the stage")


class Guard:
    """Judges one step after another. `state` is all it remembers, as JSON can hold it."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._skipped = 0

    def allows(self, loss: float) -> bool:
        return loss <= self._most(self._losses, self.config.factor)

    @property
    def max_norm(self) -> float:
        return self._most(self._norms, self.config.grad_factor)

    def wrong_with(self, loss: float, grad_norm: float) -> str | None:
        """Why this step changes no weight, None for a good one: what `allows` and `max_norm` say, in words."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "the loss or gradient is not a number"
        if not self.allows(loss):
            return _spike("loss", loss, self.config.factor, self._losses)
        if grad_norm > self.max_norm:
            return _spike("gradient norm", grad_norm, self.config.grad_factor, self._norms)
        return None

    def note(self, loss: float, grad_norm: float, wrong: str | None) -> bool:
        """Remember a step that was judged; whether the stage may go on."""
        if wrong is None:
            self._losses.append(loss)
            self._norms.append(grad_norm)
            self._skipped = 0
            return True
        self._skipped += 1
        is_number = math.isfinite(loss) and math.isfinite(grad_norm)
        policy = self.config.spike if is_number else self.config.nan
        return policy == "skip" and self._skipped < self.config.most_skips

    @property
    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "norms": list(self._norms), "skipped": self._skipped}

    def restore(self, state: dict[str, Any]) -> None:
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])
        self._skipped = state["skipped"]

    def _most(self, remembered: deque[float], factor: float) -> float:
        if self.config.spike == "off" or len(remembered) < self.config.window:
            return math.inf
        return factor * median(remembered)


def _spike(what: str, value: float, factor: float, remembered: deque[float]) -> str:
    usual = median(remembered)
    return f"its {what} of {value:.4g} is above {factor:g} times {usual:.4g}, the median of {len(remembered)} steps"
