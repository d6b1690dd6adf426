"""Prompts as token ids: one context with its questions.

Context, question and answer tokens never exceed the prompt's length. Token ids are those of the joined text, so a
prompt is tokenized like the same text in training.
"""

import hashlib
import json
import pickle
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zstandard

from unspool.core.errors import ConfigError
from unspool.evals.backends.base import ROW_TOKENS
from unspool.evals.suite import Question

Match = Literal["start", "contains", "mentions"]
Payload = str | tuple[dict[str, str], ...]
"""Input for a server that takes no token ids: text, or chat messages."""
# Extra tokens after the reference: a closing quote or full stop, and one or two more. Some tokenizers split the answer
# into more tokens after the question than alone.
EXTRA_ANSWER_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """A prompt as text."""

    question: Question

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
    """Position of the answer in the context, on the suite's grid; None if depth is not measured."""
    text: PromptText | None = None
    """The whole prompt as text; None if only ids are known."""
    payload: Payload | None = None
    """Sent instead of ids, and therefore hashed and shown; None if ids are sent."""
    answer_tokens: int | None = None
    """Answer tokens of this question, if fewer than the prompt's."""
    cut_tokens: int = 0
    """Tokens cut out of the middle, because the prompt did not fit the model's context."""

    @property
    def prefix(self) -> str:
        """Start of the answer."""
        return "" if self.text is None else self.text.question.prefix


@dataclass(frozen=True, kw_only=True)
class Prompt:
    suite: str
    length: int
    index: int
    """Index of the context within this suite and length, from 0."""
    context_ids: np.ndarray
    questions: list[PromptQuestion]
    answer_tokens: int
    match: Match
    template_tokens: int = 0
    """Number of tokens that the server's chat template adds."""

    @property
    def tokens(self) -> int:
        """Tokens of the longest question: context, question and answer."""
        return max(map(self.prompt_tokens, self.questions)) + self.answer_tokens

    def prompt_tokens(self, question: PromptQuestion) -> int:
        return self.template_tokens + len(self.context_ids) + len(question.ids)

    def excerpt(self, tokenizer: Any, question: PromptQuestion, lengths: Sequence[int]) -> dict[str, Any]:
        """Start and end of the prompt, for people who read samples. Empty except at the longest length."""
        parts = self.context_ids, question.ids
        return excerpt(tokenizer, self.length, lengths, *parts, payload=question.payload)

    def hash(self, question: PromptQuestion) -> str:
        """Hash the sent prompt, so that scores of two models can be paired by question."""
        return prompt_hash(self.context_ids, question.ids, payload=question.payload)


def merge_prompts(prompts: Sequence[Prompt]) -> Prompt:
    """Merge single-question prompts of one suite and length into one prompt without a context."""
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
    """Cut the middle out of the context until the longest question and its answer fit `limit` tokens."""
    context, excess = prompt.context_ids, prompt.tokens - limit
    if excess <= 0:
        return prompt
    if excess > len(context):
        raise ConfigError(
            f"{prompt.suite}: a question and its answer do not fit a context of {limit} tokens; remove the suite."
        )
    keep = len(context) - excess
    head, tail = keep - keep // 2, keep // 2
    return replace(
        prompt,
        context_ids=np.concatenate([context[:head], context[len(context) - tail :]]),
        questions=[replace(question, cut_tokens=excess) for question in prompt.questions],
    )


def cut_middle(tokenizer: Any, text: str, excess: int, build: Callable[[str], "EncodedQuestion"]) -> "EncodedQuestion":
    """Build a prompt after cutting at least `excess` tokens from the middle of a text (at most all of it)."""
    starts = token_starts(tokenizer, text)
    asked, ids = build(text)
    wanted = len(ids) - excess
    keep = len(starts)
    while excess > 0 and keep > 0:
        # Tokens at the cut may merge differently, so one pass may cut too few.
        keep = max(0, keep - excess)
        head, tail = keep - keep // 2, keep // 2
        end = int(starts[head]) if head < len(starts) else len(text)
        asked, ids = build(text[:end] + (text[int(starts[-tail]) :] if tail else ""))
        excess = len(ids) - wanted
    return asked, ids


# Maximum number of questions on one context that are decoded together.
MAX_SHARED = 16
# Maximum number of unrelated prompts in one row, if rows are longer than the default.
MAX_UNRELATED = 64
# A prompt longer than 1/4 of a row gets its own row.
_ROW_SHARE = 4


def group_prompts(contexts: Sequence[str], tokens: Sequence[int], row_tokens: int = ROW_TOKENS) -> list[list[int]]:
    """Group question indices: equal contexts together, short prompts in rows, other prompts alone."""
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


# Size of a prompt excerpt in a sample. The end is longer because it holds the question.
START_TOKENS, END_TOKENS = 100, 150
CHARS_PER_TOKEN = 4


def excerpt(
    tokenizer: Any, length: int, lengths: Sequence[int], *parts: np.ndarray, payload: Payload | None = None
) -> dict[str, Any]:
    """Start and end of the prompt. Empty unless `length` is the longest of `lengths`."""
    if length < max(lengths):
        return {}
    if payload is not None:
        return {"prompt": _payload_excerpt(tokenizer, payload)}
    ids = np.concatenate(parts).tolist()
    if len(ids) <= START_TOKENS + END_TOKENS:
        return {"prompt": {"start": tokenizer.decode(ids), "end": "", "cut_tokens": 0}}
    start, end = tokenizer.decode(ids[:START_TOKENS]), tokenizer.decode(ids[-END_TOKENS:])
    return {"prompt": {"start": start, "end": end, "cut_tokens": len(ids) - START_TOKENS - END_TOKENS}}


def _payload_excerpt(tokenizer: Any, payload: Payload) -> dict[str, Any]:
    # Cut by characters, because decoding tokens does not always give the sent text.
    text = payload if isinstance(payload, str) else payload[0]["content"]
    first, last = START_TOKENS * CHARS_PER_TOKEN, len(text) - END_TOKENS * CHARS_PER_TOKEN
    begun = {} if isinstance(payload, str) else {message["role"]: message["content"] for message in payload[1:]}
    if last <= first:
        return {"start": text, "end": "", "cut_tokens": 0, **begun}
    cut = len(encode(tokenizer, text[first:last]))
    return {"start": text[:first], "end": text[last:], "cut_tokens": cut, **begun}


def prompt_hash(*parts: np.ndarray, payload: Payload | None = None) -> str:
    """Hash the sent prompt: token ids, text or messages."""
    if payload is not None:
        return hashlib.sha256(json.dumps(payload).encode()).hexdigest()
    ids = np.concatenate(parts).astype("<u4")
    return hashlib.sha256(ids.tobytes()).hexdigest()


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """Tokenize a text without special tokens."""
    return np.array(_tokenized(tokenizer, text)["input_ids"], dtype=np.uint32)


def token_starts(tokenizer: Any, text: str) -> np.ndarray:
    """Start character of each token of a text."""
    offsets = _tokenized(tokenizer, text, return_offsets_mapping=True)["offset_mapping"]
    return np.array([start for start, _ in offsets], dtype=np.int64)


def _tokenized(tokenizer: Any, text: str, **options: bool) -> Any:
    # A text that spells a special token must get the tokens of its characters. `verbose` would warn about texts longer
    # than the model's context, which are intended here.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def encode_after_newline(tokenizer: Any, text: str) -> np.ndarray:
    """Tokenize `text` as if after a newline. Otherwise some tokenizers add a space before it."""
    newline, joined = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    keeps_newline = np.array_equal(joined[: len(newline)], newline)
    return joined[len(newline) :] if keeps_newline else encode(tokenizer, text)


def opening_ids(tokenizer: Any) -> np.ndarray:
    """Special tokens that the tokenizer adds before every text (usually none or one)."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    dressed: list[int] = tokenizer("a")["input_ids"]
    begun = next(at for at in range(len(dressed) + 1) if dressed[at : at + len(plain)] == plain)
    return np.array(dressed[:begun], dtype=np.uint32)


def answer_room(tokenizer: Any, references: list[str]) -> int:
    """Number of tokens to generate: the longest reference plus `EXTRA_ANSWER_TOKENS`."""
    return max(len(encode(tokenizer, f" {reference}")) for reference in references) + EXTRA_ANSWER_TOKENS


def slack(length: int) -> int:
    """Maximum number of tokens by which a prompt may be shorter than its length."""
    return max(2, length // 100)


EncodedQuestion = tuple[Question, np.ndarray]
# More than 6,500 prompts of 64K tokens need.
MAX_BYTES = 2 << 30
# Large caches contain long repeats, so a low level is enough; higher levels cost more than they save.
_LEVEL = 1


class PromptCache:
    """Keeps prompts on disk, from computing their hashes until they are run."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        # Not in /tmp, which is in memory on some machines.
        self._file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._max_bytes = max_bytes
        self._end = 0
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._compressor, self._decompressor = zstandard.ZstdCompressor(level=_LEVEL), zstandard.ZstdDecompressor()

    def put(self, key: Hashable, encoded: EncodedQuestion) -> None:
        """Store a prompt. Does nothing if the disk is full, because prompts can be rebuilt."""
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
        """Return a prompt and drop it, because every prompt is used once."""
        if key not in self._places:
            return None
        start, size = self._places.pop(key)
        self._file.seek(start)
        # Safe to unpickle: this process wrote the file, and no other process can open it.
        encoded: EncodedQuestion = pickle.loads(self._decompressor.decompress(self._file.read(size)))
        return encoded

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._places.clear()
