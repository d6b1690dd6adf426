"""Prompts as token ids: one context with the questions asked on it.

Context, question and room for the answer never exceed the prompt's length. Ids are those that the tokenizer gives for
the joined text, so a prompt reads as the same text would in training.
"""

import hashlib
import pickle
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

from unspool.core.errors import ConfigError
from unspool.data.sources.base import Message
from unspool.data.sources.files import Unreadable, first_line
from unspool.data.tokenize.chat_template import own_template
from unspool.evals.backends.base import ROW_TOKENS
from unspool.evals.suite import Question, Task

Match = Literal["start", "contains"]
# After the reference itself: a closing quote or full stop, and a token or two for tokenizers that split the answer
# into more tokens after the question than alone.
EXTRA_ANSWER_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """A prompt as text, and whether it goes through a chat template."""

    question: Question
    chat: bool

    @property
    def prompt(self) -> str:
        return self.question.context + self.question.question

    @property
    def oracle(self) -> str:
        """An answer with a full score."""
        given = self.question.meta.get("oracle")
        return " ".join(self.question.references) if given is None else str(given)


@dataclass(frozen=True, kw_only=True)
class PromptQuestion:
    ids: np.ndarray
    reference: str
    depth: float | None
    """Position of the answer in the context, on the suite's grid; None where depth is not measured."""
    text: PromptText | None = None
    """The whole prompt as text, for backends that send text; None where only ids are known."""
    answer_tokens: int | None = None
    """Fewer than the prompt's, where this question was built with room for no more."""
    cut_tokens: int = 0
    """Tokens that were cut out of the middle, because the prompt did not fit the model's context."""


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


def merge_prompts(prompts: Sequence[Prompt]) -> Prompt:
    """Merge prompts of one suite and length, with one question each, into one without a context."""
    first = prompts[0]
    return replace(
        first,
        context_ids=first.context_ids[:0],
        questions=[
            replace(
                question, ids=np.concatenate([prompt.context_ids, question.ids]), answer_tokens=prompt.answer_tokens
            )
            for prompt in prompts
            for question in prompt.questions
        ],
        answer_tokens=max(prompt.answer_tokens for prompt in prompts),
    )


def cut_context(prompt: Prompt, limit: int) -> Prompt:
    """Cut the middle out of the context, so that the longest question and its answer fit `limit` tokens."""
    context, excess = prompt.context_ids, prompt.tokens - limit
    if excess <= 0:
        return prompt
    if excess > len(context):
        raise ConfigError(f"{prompt.suite}: a question and its answer do not fit a context of {limit} tokens.")
    keep = len(context) - excess
    head, tail = keep - keep // 2, keep // 2
    return replace(
        prompt,
        context_ids=np.concatenate([context[:head], context[len(context) - tail :]]),
        questions=[replace(question, cut_tokens=excess) for question in prompt.questions],
    )


def cut_middle(tokenizer: Any, text: str, excess: int, build: Callable[[str], "EncodedQuestion"]) -> "EncodedQuestion":
    """Build a prompt from a text without at least `excess` tokens of its middle, or without all of them."""
    starts = token_starts(tokenizer, text)
    asked, ids = build(text)
    wanted = len(ids) - excess
    keep = len(starts)
    while excess > 0 and keep > 0:
        # Tokens at the cut may merge differently, so one pass may leave some too many.
        keep = max(0, keep - excess)
        head, tail = keep - keep // 2, keep // 2
        end = int(starts[head]) if head < len(starts) else len(text)
        asked, ids = build(text[:end] + (text[int(starts[-tail]) :] if tail else ""))
        excess = len(ids) - wanted
    return asked, ids


# Questions on one context that are decoded side by side.
MAX_SHARED = 16
# Prompts without a common context in one row, where rows are longer than the default.
MAX_UNRELATED = 64
# A prompt longer than this share of a row stays alone.
_ROW_SHARE = 4


def group_prompts(contexts: Sequence[str], tokens: Sequence[int], row_tokens: int = ROW_TOKENS) -> list[list[int]]:
    """Group the indices of questions: equal contexts together, short prompts in rows, the others alone."""
    by_context: dict[str, list[int]] = {}
    for place, context in enumerate(contexts):
        by_context.setdefault(context, []).append(place)
    found: list[list[int]] = []
    row: list[int] = []
    most = MAX_SHARED if row_tokens <= ROW_TOKENS else MAX_UNRELATED
    for places in by_context.values():
        if len(places) > 1:
            found += [places[at : at + MAX_SHARED] for at in range(0, len(places), MAX_SHARED)]
        elif tokens[places[0]] > row_tokens // _ROW_SHARE:
            found.append(places)
        else:
            if len(row) >= most or sum(tokens[at] for at in [*row, *places]) > row_tokens:
                found.append(row)
                row = []
            row = [*row, *places]
    found += [row] if row else []
    return sorted(found)


# Of a prompt that people read in a sample; the question is at the end.
START_TOKENS, END_TOKENS = 100, 150


def excerpt(tokenizer: Any, length: int, lengths: Sequence[int], *parts: np.ndarray) -> dict[str, Any]:
    """Decode both ends of a prompt; nothing unless `length` is the longest of `lengths`."""
    if length < max(lengths):
        return {}
    ids = np.concatenate(parts).tolist()
    if len(ids) <= START_TOKENS + END_TOKENS:
        return {"prompt": {"start": tokenizer.decode(ids), "end": "", "cut_tokens": 0}}
    start, end = tokenizer.decode(ids[:START_TOKENS]), tokenizer.decode(ids[-END_TOKENS:])
    return {"prompt": {"start": start, "end": end, "cut_tokens": len(ids) - START_TOKENS - END_TOKENS}}


def prompt_hash(*parts: np.ndarray) -> str:
    """Hash a prompt's token ids, so that scores of two models can be paired by question."""
    ids = np.concatenate(parts).astype("<u4")
    return hashlib.sha256(ids.tobytes()).hexdigest()


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Tokenize a text without special tokens."""
    return np.array(_tokenized(tokenizer, text)["input_ids"], dtype=np.uint32)


def token_starts(tokenizer: Any, text: str) -> np.ndarray:
    """Index of the character that each token of a text starts at."""
    offsets = _tokenized(tokenizer, text, return_offsets_mapping=True)["offset_mapping"]
    return np.array([start for start, _ in offsets], dtype=np.int64)


def _tokenized(tokenizer: Any, text: str, **options: bool) -> Any:
    # A text that spells a special token gets the tokens of its characters. `verbose` would warn about texts longer
    # than the model's context, which are the point here.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def encode_after_newline(tokenizer: Any, text: str) -> np.ndarray:
    """Tokenize `text` as it reads after a newline, where some tokenizers would otherwise put a space before it."""
    newline, joined = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    keeps_newline = np.array_equal(joined[: len(newline)], newline)
    return joined[len(newline) :] if keeps_newline else encode(tokenizer, text)


def opening_ids(tokenizer: Any) -> np.ndarray:
    """Special tokens that the tokenizer puts before every text, most often none or one."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed: list[int] = tokenizer("a")["input_ids"]
    begun = next(at for at in range(len(dressed) + 1) if dressed[at : at + len(plain)] == plain)
    return np.array(dressed[:begun], dtype=np.uint32)


def answer_room(tokenizer: Any, references: list[str]) -> int:
    """Tokens to generate: the longest reference and `EXTRA_ANSWER_TOKENS`."""
    return max(len(encode(tokenizer, f" {reference}")) for reference in references) + EXTRA_ANSWER_TOKENS


def slack(length: int) -> int:
    """How many tokens shorter than its length a prompt may be."""
    return max(2, length // 100)


Chat = Literal["auto", "on", "off"]
# Stands for the user's text while a template is split; no template and no tokenizer has a meaning for it.
_PLACEHOLDER = "UNSPOOLWORDS"
# Tokens at the borders of a template may be merged differently around another text.
_BORDERS = 2


@dataclass(frozen=True)
class PromptEncoder:
    """Turns questions into token ids, through the tokenizer's chat template or without it."""

    tokenizer: Any

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def uses_chat(self, task: Task, chat: Chat) -> bool:
        if chat == "on" and not self.has_template:
            raise ConfigError("chat: on, but this model's tokenizer has no chat template; use chat: off or auto.")
        return chat == "on" or (chat == "auto" and task.chat and self.has_template)

    def overhead(self, *, chat: bool) -> int:
        """Count the tokens around the text."""
        if not chat:
            return len(self._opening)
        head, tail, _ = self._template
        return len(self._with_special(head)) + len(self._with_special(tail)) + _BORDERS

    def ids(self, asked: Question, *, chat: bool) -> np.ndarray:
        if not chat:
            return np.concatenate(
                [self._opening, encode(self.tokenizer, asked.context + asked.question + asked.prefix)]
            )
        head, tail, trims = self._template
        words = asked.context + asked.question
        words = words.strip() if trims else words
        if any(token in words + asked.prefix for token in self._special_tokens):
            parts = [self._with_special(head), encode(self.tokenizer, words), self._with_special(tail)]
            return np.concatenate([*parts, encode(self.tokenizer, asked.prefix)])
        return self._with_special(head + words + tail + asked.prefix)

    @cached_property
    def _opening(self) -> np.ndarray:
        return opening_ids(self.tokenizer)

    @cached_property
    def _special_tokens(self) -> list[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return sorted({*self.tokenizer.all_special_tokens, *(token.content for token in added.values())})

    @cached_property
    def _template(self) -> tuple[str, str, bool]:
        """Text before and after the user's message, and whether the template strips the message."""
        plain = self._render(_PLACEHOLDER)
        if plain.count(_PLACEHOLDER) != 1:
            raise ConfigError(
                "this model's chat template does not contain the user's message exactly once; use chat: off."
            )
        head, tail = plain.split(_PLACEHOLDER)
        return head, tail, f" {_PLACEHOLDER} " not in self._render(f" {_PLACEHOLDER} ")

    def _render(self, words: str) -> str:
        try:
            template = own_template(self.tokenizer)
            return template.render([Message("user", words)], prompt=True)
        except (Unreadable, ValueError) as error:
            raise ConfigError(
                f"this model's chat template cannot render a user message ({first_line(error)}); use chat: off."
            ) from error

    def _with_special(self, text: str) -> np.ndarray:
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(found, dtype=np.uint32)


EncodedQuestion = tuple[Question, np.ndarray]
# More than a suite of 6,500 prompts of 64K tokens takes.
MAX_BYTES = 2 << 30
# Text and ids come in long repeats where it matters; higher levels cost more than they save.
_LEVEL = 1


class PromptCache:
    """Keeps prompts that were built for their hashes on disk until they are asked."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        # Beside the results and not in /tmp, which is memory on some machines.
        self._file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._max_bytes = max_bytes
        self._end = 0
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._compressor, self._decompressor = zstandard.ZstdCompressor(level=_LEVEL), zstandard.ZstdDecompressor()

    def put(self, key: Hashable, encoded: EncodedQuestion) -> None:
        """Store a prompt; do nothing where there is no space, since prompts can be built again."""
        if self._file is None:
            return
        packed = self._compressor.compress(pickle.dumps(encoded, protocol=pickle.HIGHEST_PROTOCOL))
        if self._end + len(packed) > self._max_bytes:
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

    def take(self, key: Hashable) -> EncodedQuestion | None:
        """Return and forget a prompt, since every prompt is asked once."""
        if key not in self._places:
            return None
        start, size = self._places.pop(key)
        self._file.seek(start)
        # Written by this process into a file that no other can open.
        encoded: EncodedQuestion = pickle.loads(self._decompressor.decompress(self._file.read(size)))
        return encoded

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._places.clear()
