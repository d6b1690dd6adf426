"""A prompt: one context with the questions asked on it, as token ids.

Promise: context, question and room for the answer together never exceed the prompt's length;
ids are those the tokenizer gives for the joined text, so a prompt reads as the same text would in training.
Elsewhere: what prompts say (tasks/), how answers are judged (score.py).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from unspool.eval.task import Asked

Match = Literal["start", "contains"]
# After the reference itself: a closing quote or full stop, and a token or two of slack for
# tokenizers that write the answer in more pieces after the question than alone.
EXTRA_ANSWER_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Words:
    """A prompt as text, and whether it goes through a chat template."""

    asked: Asked
    chat: bool

    @property
    def text(self) -> str:
        return self.asked.context + self.asked.question

    @property
    def oracle(self) -> str:
        """An answer that scores full marks."""
        told = self.asked.meta.get("oracle")
        return " ".join(self.asked.references) if told is None else str(told)


@dataclass(frozen=True, kw_only=True)
class Question:
    ids: np.ndarray
    reference: str
    depth: float | None
    """Where the answer stands in the context, on the suite's grid; None where depth is not measured."""
    words: Words | None = None
    """The whole prompt as text, for backends that want to be asked in words; None where only ids are known."""
    answer_tokens: int | None = None
    """Fewer than the prompt's, where this question was built with room for no more."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    suite: str
    length: int
    index: int
    """Which context of this suite and length, from 0."""
    context_ids: np.ndarray
    questions: list[Question]
    answer_tokens: int
    match: Match

    @property
    def tokens(self) -> int:
        """What the longest question needs: context, question and answer."""
        return len(self.context_ids) + max(len(asked.ids) for asked in self.questions) + self.answer_tokens


def joined(prompts: Sequence[Prompt]) -> Prompt:
    """Prompts of one suite and length, with one question each, as one that has no context."""
    first = prompts[0]
    return replace(
        first,
        context_ids=first.context_ids[:0],
        questions=[
            replace(asked, ids=np.concatenate([prompt.context_ids, asked.ids]), answer_tokens=prompt.answer_tokens)
            for prompt in prompts
            for asked in prompt.questions
        ],
        answer_tokens=max(prompt.answer_tokens for prompt in prompts),
    )


@dataclass(frozen=True, kw_only=True)
class Materials:
    """What prompts are made of."""

    tokenizer: Any
    words: list[str] = field(repr=False)
    documents: list[str] = field(repr=False)
    """Held-out texts; empty where no suite asks for any."""


def prompt_hash(*parts: np.ndarray) -> str:
    """Names a prompt by its token ids, so that two scores can be known to answer the same question."""
    ids = np.concatenate(parts).astype("<u4")
    return hashlib.sha256(ids.tobytes()).hexdigest()


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """The text's own token ids."""
    return np.array(_tokenized(tokenizer, text)["input_ids"], dtype=np.uint32)


def token_starts(tokenizer: Any, text: str) -> np.ndarray:
    """The character that each token of a text starts at."""
    offsets = _tokenized(tokenizer, text, return_offsets_mapping=True)["offset_mapping"]
    return np.array([start for start, _ in offsets], dtype=np.int64)


def _tokenized(tokenizer: Any, text: str, **options: bool) -> Any:
    # Text is only text: one that spells a control token gets the tokens of its characters. And
    # `verbose` would warn about texts longer than the model's context, which is what we are here for.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def encode_after_newline(tokenizer: Any, text: str) -> np.ndarray:
    """Token ids of `text` as it stands on a new line.

    Some tokenizers put a space before whatever they are given; on a line of its own there is none.
    """
    newline, joined = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    keeps_newline = np.array_equal(joined[: len(newline)], newline)
    return joined[len(newline) :] if keeps_newline else encode(tokenizer, text)


def opening_ids(tokenizer: Any) -> np.ndarray:
    """What the tokenizer puts before every text, most often nothing or one token."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed: list[int] = tokenizer("a")["input_ids"]
    begun = next(at for at in range(len(dressed) + 1) if dressed[at : at + len(plain)] == plain)
    return np.array(dressed[:begun], dtype=np.uint32)


def answer_room(tokenizer: Any, references: list[str]) -> int:
    """Tokens to generate: the longest reference and a little more."""
    return max(len(encode(tokenizer, f" {reference}")) for reference in references) + EXTRA_ANSWER_TOKENS


def slack(length: int) -> int:
    """How many tokens short of its length a prompt may stay."""
    return max(2, length // 100)
