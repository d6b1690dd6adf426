"""From a question as text to the token ids a model reads.

In: `Asked`, a tokenizer. Out: ids, and how many tokens a chat template adds.
Promise: base: the tokenizer's opening and then the ids of the joined text; chat: the ids of the template's own text
with the answer's first words prefilled. A text that spells a control token gets the tokens of its characters.
Elsewhere: what is asked (task.py), which questions are read together (grouping.py).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from unspool.base.errors import ConfigError
from unspool.eval.prompt import encode, opening_ids
from unspool.eval.task import Asked, Task

Chat = Literal["auto", "on", "off"]
# Stands for the user's words while a template is looked at; no template and no tokenizer has a meaning for it.
_WORDS = "UNSPOOLWORDS"
# Tokens at the borders of a template may be joined otherwise around other words.
_BORDERS = 2


@dataclass(frozen=True)
class Asker:
    """Asks in the way of one tokenizer."""

    tokenizer: Any

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def uses_chat(self, task: Task, chat: Chat) -> bool:
        if chat == "on" and not self.has_template:
            raise ConfigError("chat: on, but this model's tokenizer has no chat template; use chat: off or auto.")
        return chat == "on" or (chat == "auto" and task.chat and self.has_template)

    def overhead(self, *, chat: bool) -> int:
        """Tokens around the text."""
        if not chat:
            return len(self._opening)
        head, tail, _ = self._template
        return len(self._with_marks(head)) + len(self._with_marks(tail)) + _BORDERS

    def ids(self, asked: Asked, *, chat: bool) -> np.ndarray:
        if not chat:
            return np.concatenate(
                [self._opening, encode(self.tokenizer, asked.context + asked.question + asked.prefix)]
            )
        head, tail, trims = self._template
        words = asked.context + asked.question
        words = words.strip() if trims else words
        if any(mark in words + asked.prefix for mark in self._marks):
            parts = [self._with_marks(head), encode(self.tokenizer, words), self._with_marks(tail)]
            return np.concatenate([*parts, encode(self.tokenizer, asked.prefix)])
        return self._with_marks(head + words + tail + asked.prefix)

    @cached_property
    def _opening(self) -> np.ndarray:
        return opening_ids(self.tokenizer)

    @cached_property
    def _marks(self) -> list[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return sorted({*self.tokenizer.all_special_tokens, *(token.content for token in added.values())})

    @cached_property
    def _template(self) -> tuple[str, str, bool]:
        """What stands before and after the user's words, and whether these lose the space around them."""
        plain = self._render(_WORDS)
        if plain.count(_WORDS) != 1:
            raise ConfigError("this model's chat template does not write the user's words once; use chat: off.")
        head, tail = plain.split(_WORDS)
        return head, tail, f" {_WORDS} " not in self._render(f" {_WORDS} ")

    def _render(self, words: str) -> str:
        turns = [{"role": "user", "content": words}]
        text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text

    def _with_marks(self, text: str) -> np.ndarray:
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(found, dtype=np.uint32)
