"""The wording of facts and questions, the same in generated training documents and in evaluation prompts.

A question ends exactly where its answer begins: after a space for facts, directly after the opening quote for pairs.
"""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from unspool.core.errors import DataError

# With fewer words, a lucky guess would look like recall.
FEWEST_WORDS = 64


def fact(key: str, value: str, kind: str) -> str:
    """Build a sentence to hide in prose; `kind` is "number" or "word"."""
    return f"The special magic {kind} for {key} is {value}."


def question(key: str, kind: str) -> str:
    """Build a question about a fact; the answer follows after a space."""
    return "".join(split_question(key, kind))


def split_question(key: str, kind: str) -> tuple[str, str]:
    """Return the question alone, and the beginning of its answer."""
    return f"What is the special magic {kind} for {key}?", f" The special magic {kind} for {key} is"


def pairs_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Build a JSON object with keys in the given order."""
    return json.dumps(dict(pairs), ensure_ascii=False)


def pair_question(key: str) -> str:
    """Build an entry to complete; the answer follows directly, then a closing quote.

    It looks like an entry of the object: a base model continues a pattern without any instruction.
    """
    return f'\n"{key}": "'


def split_pair_question(key: str) -> tuple[str, str]:
    """Return a question about a pair, for instruct models, and the beginning of its answer."""
    return f'Which value does the JSON object above give for the key "{key}"?', f'"{key}": "'


def word_list() -> list[str]:
    """Load the included list of common words."""
    path = files("unspool") / "assets" / "words.txt"
    try:
        words = path.read_text(encoding="utf-8").split()
    except OSError as error:
        raise DataError(f"The word list {path} cannot be read ({error}); reinstall unspool.") from error
    return list(dict.fromkeys(words))


def single_token_words(tokenizer: Callable[..., Any], words: list[str]) -> list[str]:
    """Select words that are one token both with and without a leading space; all words if these are too few.

    A small model learns to recall one token long before several.
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
