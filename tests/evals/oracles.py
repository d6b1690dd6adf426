"""Backends that only pretend to be models."""

from typing import Any

import numpy as np

from unspool.evals.backends.base import Backend
from unspool.evals.prompts import Prompt


class Oracle(Backend):
    """Knows every answer; a token's loss is its position."""

    has_losses = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.contexts = 0

    def answers(self, prompt: Prompt) -> list[str]:
        self.contexts += 1
        return [f" {question.reference}." for question in prompt.questions]

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        self.contexts += 1
        return np.arange(1, len(ids), dtype=np.float64)


class Silent(Oracle):
    def answers(self, prompt: Prompt) -> list[str]:
        return [""] * len(prompt.questions)


class Rambler(Oracle):
    """Lists the whole context, in which every answer stands."""

    def answers(self, prompt: Prompt) -> list[str]:
        return ["Well, " + self.tokenizer.decode(prompt.context_ids)] * len(prompt.questions)


class Killed(Oracle):
    """Answers a few contexts, then dies in the middle of the next one."""

    def __init__(self, tokenizer: Any, after: int) -> None:
        super().__init__(tokenizer)
        self.after = after

    def _live(self) -> None:
        if self.contexts >= self.after:
            raise KeyboardInterrupt

    def answers(self, prompt: Prompt) -> list[str]:
        self._live()
        return super().answers(prompt)

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        self._live()
        return super().window_losses(ids)
