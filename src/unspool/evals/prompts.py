"""A prompt: one context with the questions asked on it, as token ids.

Promise: context, question and room for the answer together never exceed the prompt's length;
ids are those the tokenizer gives for the joined text, so a prompt reads as the same text would in training.
Elsewhere: what prompts say (tasks/), how answers are judged (score.py).
"""

import hashlib
import pickle
import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

from unspool.core.errors import ConfigError
from unspool.evals.suite import Question, Task

Match = Literal["start", "contains"]
# After the reference itself: a closing quote or full stop, and a token or two of slack for
# tokenizers that write the answer in more pieces after the question than alone.
EXTRA_ANSWER_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Words:
    """A prompt as text, and whether it goes through a chat template."""

    asked: Question
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
class PromptQuestion:
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
    questions: list[PromptQuestion]
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


# From a question as text to the token ids a model reads.


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

    def ids(self, asked: Question, *, chat: bool) -> np.ndarray:
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


# Prompts that were made for their hashes, kept on disk until they are asked.


# More than a suite of 6,500 prompts of 64K tokens takes.
MOST_BYTES = 2 << 30
# Text and ids come in long repeats where it matters; higher levels cost more than they save.
_LEVEL = 1

Made = tuple[Question, np.ndarray]


class Spool:
    def __init__(self, folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
        # Beside the results and not in /tmp, which is memory on some machines.
        self._file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._most_bytes = most_bytes
        self._end = 0
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._packer, self._unpacker = zstandard.ZstdCompressor(level=_LEVEL), zstandard.ZstdDecompressor()

    def put(self, key: Hashable, made: Made) -> None:
        if self._file is None:
            return
        asked, ids = made
        packed = self._packer.compress(pickle.dumps((asked, ids), protocol=pickle.HIGHEST_PROTOCOL))
        if self._end + len(packed) > self._most_bytes:
            return
        try:
            self._file.seek(self._end)
            self._file.write(packed)
            self._file.flush()
        except OSError:
            self.close()
            return
        self._places[key] = self._end, len(packed)
        self._end += len(packed)

    def take(self, key: Hashable) -> Made | None:
        """What was put there, once: prompts are asked once."""
        if key not in self._places:
            return None
        start, size = self._places.pop(key)
        self._file.seek(start)
        # Written by this process into a file that no other can open.
        made: Made = pickle.loads(self._unpacker.decompress(self._file.read(size)))
        return made

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._places.clear()
