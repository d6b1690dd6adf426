"""Generated documents that state facts and ask for them again, at any length.

Ordinary text asks a small model to recall so rarely that it never learns to; here every document
holds many questions, each with its answer. In the wording the evaluations use: facts hidden in prose,
and a JSON object followed by entries to complete. Besides these, word lists said twice and more: copying
what came before is the skill both build on, and such lists teach it fastest.
Promise: keys are distinct within a document, and every answer stands earlier in it, stated once.
Price: lengths are met approximately (from average token counts), never checked token by token.
Elsewhere: the wording (wording.py), turning text into tokens (tokens.py).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.data.facts import fact, pair_question, pairs_text, question, single_token_words, word_list
from unspool.data.sources.config import RecallSource

KIND = "word"
# Enough prose for variety; more would only cost start-up time.
PROSE_CHARS = 4_000_000
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Average tokens of each part of a document."""

    fact: float
    question: float
    pair: float
    pair_question: float
    word: float


def recall_documents(
    source: RecallSource, tokenizer: Callable[..., dict[str, list[list[int]]]], prose: Iterable[str], seed: int
) -> Iterator[str]:
    """Documents of `source.length` tokens each, until about `source.tokens` have been made."""
    words = single_token_words(tokenizer, word_list())
    sentences = _sentences(prose)
    lengths = _token_counts(tokenizer, [" " + sentence for sentence in sentences])
    costs = _costs(tokenizer, words)
    rng = rng_for(seed, "recall")
    made = 0
    while made < source.tokens:
        # One token is kept for the end-of-text mark that tokenising adds.
        room = int(rng.integers(source.length[0], source.length[1] + 1)) - 1
        form = rng.random()
        if form < source.pairs:
            yield pairs_document(words, costs, room, rng, asked=source.asked)
        elif form < source.pairs + source.repeats:
            yield repeats_document(words, costs, room, rng)
        else:
            yield facts_document(words, sentences, lengths, costs, room, rng)
        made += room + 1


def pairs_document(words: list[str], costs: Costs, room: int, rng: np.random.Generator, *, asked: float) -> str:
    """A JSON object, then entries of it to complete, until the room is filled.

    Small objects are as frequent as large ones: a model learns to look up among few keys first. The largest leave room
    for `asked` questions a key, and for one at the least; with one for each, no object is longer than about half of the
    document.
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
    """A list of random words, said again until the room is filled: from the second time on, all can be copied."""
    total = max(4, int(room / costs.word))
    count = int(rng.integers(2, total // 2 + 1))
    once = rng.integers(len(words), size=count)
    return " ".join(words[index] for index in np.resize(once, total))


def facts_document(
    words: list[str], sentences: list[str], lengths: np.ndarray, costs: Costs, room: int, rng: np.random.Generator
) -> str:
    """Prose with facts in it, then every fact again, in another order, as a question or just restated.

    Restating is half as long as asking, so it gives twice the practice in the same room.
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


def _sentences(prose: Iterable[str]) -> list[str]:
    sentences: list[str] = []
    chars = 0
    for text in prose:
        flat = " ".join(text[: PROSE_CHARS - chars].split())
        sentences += [sentence for sentence in _SENTENCE_END.split(flat) if 20 <= len(sentence) <= 400]
        chars += len(text)
        if chars >= PROSE_CHARS:
            break
    if not sentences:
        raise DataError("recall: the prose holds no sentence of 20 to 400 characters; give it ordinary text.")
    return sentences


def _token_counts(tokenizer: Callable[..., dict[str, list[list[int]]]], texts: list[str]) -> np.ndarray:
    return np.array([len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]])


def _costs(tokenizer: Callable[..., dict[str, list[list[int]]]], words: list[str]) -> Costs:
    sample = words[:64]

    def mean(texts: list[str]) -> float:
        return float(_token_counts(tokenizer, texts).mean())

    pairs = list(zip(sample, reversed(sample), strict=True))
    return Costs(
        fact=mean([" " + fact(key, value, KIND) for key, value in pairs]),
        question=mean([f"\n{question(key, KIND)} {value}." for key, value in pairs]),
        pair=mean([pairs_text(pairs)]) / len(pairs),
        pair_question=mean([f'{pair_question(key)}{value}"' for key, value in pairs]),
        word=mean([f" {word}" for word in sample]),
    )
