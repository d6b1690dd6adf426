"""Backends that only pretend to be models: what a suite should score at 100, at 0, and must not be fooled by."""

from typing import Any

import numpy as np

from unspool.evals.prompts import Prompt, PromptQuestion

# Of the prompt's end, what an adversary repeats.
REPEATED = 4000


class Mock:
    """Answers by rule; a token's loss is its position."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def answers(self, prompt: Prompt) -> list[str]:
        return [self.answer(prompt, question) for question in prompt.questions]

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        raise NotImplementedError

    def window_losses(self, ids: np.ndarray) -> np.ndarray:
        return np.arange(1, len(ids), dtype=np.float64)


class Oracle(Mock):
    """Knows every answer."""

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        return f" {question.reference}." if question.words is None else question.words.oracle


class Empty(Mock):
    """Says nothing."""

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        return ""


class Adversarial(Mock):
    """Repeats the end of what it was asked, with what breaks careless readers: control characters and markup."""

    def answer(self, prompt: Prompt, question: PromptQuestion) -> str:
        ids = np.concatenate([prompt.context_ids, question.ids])[-REPEATED:]
        return f"\x1b[2J\x00\u2028<script>alert(1)</script>\n{self.tokenizer.decode(ids)}"


MOCKS = {"oracle": Oracle, "empty": Empty, "adversarial": Adversarial}
