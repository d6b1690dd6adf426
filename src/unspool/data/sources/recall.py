"""Source kind `recall`: generated documents that state facts, then ask questions about them, at any length.

Ordinary text requires recall so rarely that a small model never learns it. Here every document holds many questions
with their answers, worded as in the evaluations. There are facts hidden in prose, and JSON objects followed by entries
to complete. Some documents are repeated word lists: both tasks build on copying, and such lists teach copying fastest.

Keys are distinct within a document, and every answer is stated before its question. Lengths are approximate, from
average token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from unspool.core.rng import rng_for
from unspool.data.facts import fact, pair_question, pairs_text, question, single_token_words, word_list
from unspool.data.sources.base import Document, Item
from unspool.data.sources.generated import GeneratedSource, split_sentences

if TYPE_CHECKING:
    from unspool.data.tokenize.encoder import Encoder

KIND = "word"
# Enough prose for variety; more would only slow down the start.
PROSE_CHARS = 4_000_000

Tokenize = Callable[..., dict[str, list[list[int]]]]  # has the call signature of a Hugging Face tokenizer


class RecallSource(GeneratedSource):
    """Generated documents that state facts, then ask questions about them."""

    kind: Literal["recall"]
    prose: str = Field(description="JSONL or text files whose text surrounds the facts.")
    pairs: float = Field(
        0.5, ge=0, le=1, description="Share of documents that are JSON key-value objects. The rest are facts in prose."
    )
    repeats: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of documents that are repeated word lists, from which a model first learns to copy.",
    )
    asked: float = Field(
        1.0,
        gt=0,
        description="Number of questions per key in the largest JSON objects. Values below 1 allow larger objects.",
    )

    min_length: ClassVar[int] = 48
    example_length: ClassVar[str] = "[128, 256]"

    @model_validator(mode="after")
    def _check_shares(self) -> RecallSource:
        if self.pairs + self.repeats > 1:
            raise ValueError("pairs and repeats must not exceed 1 together; the rest are facts in prose")
        return self

    def divide(self, units: list[Path], seed: int) -> list[list[Path]]:
        return [units]  # one task, because documents are drawn in sequence

    def read(self, task: list[Path], seed: int, encoder: Encoder | None = None) -> Iterator[Item]:
        assert encoder is not None, "generating needs a tokenizer"
        for number, text in enumerate(generate_documents(self, encoder, self.read_prose(task), seed), start=1):
            yield Document(f"recall:{number}", text)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Average tokens of each part of a document."""

    fact: float
    question: float
    pair: float
    pair_question: float
    word: float


def generate_documents(source: RecallSource, tokenize: Tokenize, prose: Iterable[str], seed: int) -> Iterator[str]:
    """Yield documents of `source.length` tokens each until there are about `source.tokens`."""
    words = single_token_words(tokenize, word_list())
    sentences = split_sentences(prose, kind="recall", max_chars=PROSE_CHARS)
    lengths = _token_counts(tokenize, [" " + sentence for sentence in sentences])
    costs = _measure_costs(tokenize, words)
    rng = rng_for(seed, "recall")
    generated = 0
    while generated < source.tokens:
        # Tokenizing adds one EOS token.
        room = int(rng.integers(source.length[0], source.length[1] + 1)) - 1
        form = rng.random()
        if form < source.pairs:
            yield pairs_document(words, costs, room, rng, asked=source.asked)
        elif form < source.pairs + source.repeats:
            yield repeats_document(words, costs, room, rng)
        else:
            yield facts_document(words, sentences, lengths, costs, room, rng)
        generated += room + 1


def pairs_document(words: list[str], costs: Costs, room: int, rng: np.random.Generator, *, asked: float) -> str:
    """Build a JSON object and entries of it to complete, `room` tokens in total.

    Small objects are as frequent as large ones, because a model first learns lookups among few keys. The largest leave
    space for `asked` questions per key, and for at least one question. With one question per key, an object takes about
    half of the document at most.
    """
    most = int(min(room / (costs.pair + asked * costs.pair_question), (room - costs.pair_question) / costs.pair))
    count = int(rng.integers(2, max(2, min(most, len(words))) + 1))
    keys = rng.choice(len(words), size=count, replace=False)
    values = rng.integers(len(words), size=count)
    pairs = [(words[key], words[value]) for key, value in zip(keys, values, strict=True)]
    num_asked = max(1, int((room - count * costs.pair) / costs.pair_question))
    turns = np.concatenate([rng.permutation(count) for _ in range(-(-num_asked // count))])[:num_asked]
    answers = [f'{pair_question(pairs[index][0])}{pairs[index][1]}"' for index in turns]
    return pairs_text(pairs) + "".join(answers)


def repeats_document(words: list[str], costs: Costs, room: int, rng: np.random.Generator) -> str:
    """Build a list of random words, repeated to `room` tokens; from the second repetition on, all can be copied."""
    total = max(4, int(room / costs.word))
    count = int(rng.integers(2, total // 2 + 1))
    once = rng.integers(len(words), size=count)
    return " ".join(words[index] for index in np.resize(once, total))


def facts_document(
    words: list[str], sentences: list[str], lengths: np.ndarray, costs: Costs, room: int, rng: np.random.Generator
) -> str:
    """Build prose with facts in it, then repeat every fact in another order, as a question or a statement.

    A statement is half as long as a question with its answer, so it gives twice the practice in the same space.
    """
    restated = (costs.fact + costs.question) / 2
    most = max(2, int(0.7 * room / (costs.fact + restated)))
    count = int(rng.integers(1, min(most, len(words) // 2) + 1))
    drawn = rng.choice(len(words), size=2 * count, replace=False)
    pairs = [(words[key], words[value]) for key, value in zip(drawn[:count], drawn[count:], strict=True)]

    start = int(rng.integers(len(sentences)))
    prose_room = room - count * (costs.fact + restated)
    order = (start + np.arange(min(len(sentences), max(1, int(prose_room))))) % len(sentences)
    taken = int(np.searchsorted(np.cumsum(lengths[order]), prose_room, side="right"))
    parts = [sentences[index] for index in order[:taken]]
    for key, value in pairs:
        parts.insert(int(rng.integers(len(parts) + 1)), fact(key, value, KIND))
    answers = [
        f"{question(key, KIND)} {value}." if rng.random() < 0.5 else fact(key, value, KIND)
        for key, value in (pairs[index] for index in rng.permutation(count))
    ]
    return " ".join(parts) + "\n" + "\n".join(answers)


def _token_counts(tokenize: Tokenize, texts: list[str]) -> np.ndarray:
    return np.array([len(ids) for ids in tokenize(texts, add_special_tokens=False)["input_ids"]])


def _measure_costs(tokenize: Tokenize, words: list[str]) -> Costs:
    sample = words[:64]

    def mean(texts: list[str]) -> float:
        return float(_token_counts(tokenize, texts).mean())

    pairs = list(zip(sample, reversed(sample), strict=True))
    return Costs(
        fact=mean([" " + fact(key, value, KIND) for key, value in pairs]),
        question=mean([f"\n{question(key, KIND)} {value}." for key, value in pairs]),
        pair=mean([pairs_text(pairs)]) / len(pairs),
        pair_question=mean([f'{pair_question(key)}{value}"' for key, value in pairs]),
        word=mean([f" {word}" for word in sample]),
    )
