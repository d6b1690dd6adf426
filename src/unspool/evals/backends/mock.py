"""Backends without a model for testing suites: perfect answers, empty answers and adversarial answers."""

from typing import Any

import numpy as np

from unspool.evals.backends.base import Backend, BackendOptions, ContextLimit, claimed_context
from unspool.evals.prompts import Prompt, PromptQuestion

# Number of tokens at the end of the prompt that `Adversarial` repeats.
REPEATED = 4000


class Mock(Backend):
    """Answers by rule; the loss of a token is its position."""

    has_losses = True

    def __init__(self, tokenizer: Any, context: ContextLimit | None = None) -> None:
        self.tokenizer, self.context_limit = tokenizer, context

    def answers(self, prompt: Prompt) -> list[str]:
        return [self.answer(prompt, question) for question in prompt.questions]

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        raise NotImplementedError

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return np.arange(1, len(ids), dtype=np.float64)


class Oracle(Mock):
    """Answers every question correctly."""

    kind = "oracle"

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        return f" {question.reference}." if question.text is None else question.text.oracle


class Empty(Mock):
    """Answers nothing."""

    kind = "empty"

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        return ""


class Adversarial(Mock):
    """Repeats the end of the prompt, with control characters and markup that break careless parsers."""

    kind = "adversarial"

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        ids = np.concatenate([prompt.context_ids, question.ids])[-REPEATED:]
        return f"\x1b[2J\x00\u2028<script>alert(1)</script>\n{self.tokenizer.decode(ids)}"


MOCKS = {"oracle": Oracle, "empty": Empty, "adversarial": Adversarial}


def build(options: BackendOptions) -> Mock:
    from unspool.models.tokenizer import load_tokenizer

    return MOCKS[options.kind](load_tokenizer(options.model), claimed_context(options.model))
