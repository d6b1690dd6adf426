"""The wording of facts and questions, the same in generated training documents and in evaluation prompts.

A question ends exactly where its answer begins: after a space for facts, directly after the opening quote for pairs.
"""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from unspool.core.errors import DataError

# With fewer words, guessing one of them would look like recall.
FEWEST_WORDS = 64


def fact(key: str, value: str, kind: str) -> str:
    """A sentence to hide in prose; `kind` is "number" or "word"."""
    return f"The special magic {kind} for {key} is {value}."


def question(key: str, kind: str) -> str:
    """A question for a fact; the answer follows after a space."""
    return "".join(split_question(key, kind))


def split_question(key: str, kind: str) -> tuple[str, str]:
    """The question itself, and how its answer begins."""
    return f"What is the special magic {kind} for {key}?", f" The special magic {kind} for {key} is"


def pairs_text(pairs: Sequence[tuple[str, str]]) -> str:
    """A JSON object, keys in the order given."""
    return json.dumps(dict(pairs), ensure_ascii=False)


def pair_question(key: str) -> str:
    """An entry to complete; the answer follows directly, then a closing quote.

    It is written as in the object: a base model continues a pattern it has seen, without any instruction.
    """
    return f'\n"{key}": "'


def split_pair_question(key: str) -> tuple[str, str]:
    """A question for a pair, for models that answer instead of continuing, and how its answer begins."""
    return f'Which value does the JSON object above give for the key "{key}"?', f'"{key}": "'


def word_list() -> list[str]:
    """The shipped list of common words."""
    path = files("unspool") / "assets" / "words.txt"
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise DataError(f"The word list {path} cannot be read ({error}); install unspool again.") from error
    return list(dict.fromkeys(words))


def single_token_words(tokenizer: Callable[..., Any], words: list[str]) -> list[str]:
    """Select the words that are one token both with and without a space before them; all if these are too few.

    A small model can recall one token long before it can spell out several.
    """
    spaced = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    bare = tokenizer(words, add_special_tokens=False)["input_ids"]
    single = [word for word, *ids in zip(words, spaced, bare, strict=True) if all(len(tokens) == 1 for tokens in ids)]
    return single if len(single) >= FEWEST_WORDS else words


def distinct_keys(words: list[str], count: int, rng: np.random.Generator) -> list[str]:
    """Draw `count` different keys: words in random order, then words joined by hyphens when words run out."""
    assert words
    keys: list[str] = []
    joined = 1
    while len(keys) < count:
        pool = len(words) ** joined
        drawn = rng.choice(pool, size=min(pool, count - len(keys)), replace=False)
        keys += ["-".join(words[at // len(words) ** place % len(words)] for place in range(joined)) for at in drawn]
        joined += 1
    return keys
