"""The special tokens of tangled rows (knots), their ids in a tokenizer, and the labels of chunks.

A tokenizer keeps the knots it has. Missing ones replace reserved entries if there are enough for `MOST_HOPS`, such as
Llama's <|reserved_special_token_N|> or Gemma's <unusedN>. The entries are renamed, and the embedding keeps its size.
Otherwise they are appended. Reserved entries in use (EOS, a chat template) are not touched. Of the others, those with
the highest numbers are used first, because publishers give new roles to the lowest.

The id of a knot depends only on the tokenizer, so datasets for one model agree. A saved tokenizer has the same knots
after loading. Knots are special tokens: text that spells a knot is not parsed as one.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from unspool.data.strategies.utk import MOST_HOPS
from unspool.data.tokenize.encoder import Encoder

ALL_KNOTS = (
    *(f"<|knot:{name}|>" for name in ("D", "/D", "S", "s", "/S")),
    *(f"<|knot:{end}{cut}|>" for cut in range(1, MOST_HOPS) for end in "ht"),
)
_RESERVED = re.compile(
    r"(?:<\|?|\[|>>|<｜)"
    r"(?:reserved(?:_special)?(?:_token)?_?|unused(?:_token)?_?|control_|special_|dummy_|placeholder_?|extra_|place▁holder▁no▁)"
    r"(\d+)"
    r"(?:\|?>|\]|<<|｜>)",
    re.IGNORECASE,
)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def knot_names(hops: int) -> tuple[str, ...]:
    """Return the knots for documents in up to `hops` pieces, in a fixed order; at least those for three."""
    return ALL_KNOTS[: 5 + 2 * (max(hops, 3) - 1)]


KNOTS = knot_names(3)


def knot_ids(tokenizer: Any, hops: int = 3) -> dict[str, int]:
    """Return the ids of the knots; add missing ones to `tokenizer` in place."""
    return add_knots(tokenizer, knot_names(hops))


def add_knots(tokenizer: Any, names: Sequence[str]) -> dict[str, int]:
    """Like `knot_ids`, for the given names."""
    vocabulary = tokenizer.get_vocab()
    missing = [name for name in ALL_KNOTS if name not in vocabulary]
    spare = spare_ids(tokenizer) if set(names) & set(missing) else []
    if len(spare) >= len(missing):
        places = dict(zip(missing, spare, strict=False))
        _rename(tokenizer, {places[name]: name for name in names if name in places})
    else:
        # Special, so that text that spells a knot is not parsed as one.
        added = [AddedToken(name, special=True, normalized=False) for name in names if name in missing]
        tokenizer.add_tokens(added, special_tokens=True)
    return {name: int(tokenizer.convert_tokens_to_ids(name)) for name in names}


def spare_ids(tokenizer: Any) -> list[int]:
    """Return the ids of unused reserved entries, the highest number first."""
    post_processor = tokenizer.backend_tokenizer.post_processor
    dressing = post_processor.__getstate__().decode() if post_processor else ""
    used = json.dumps(tokenizer.chat_template, ensure_ascii=False) + dressing
    roles = {str(getattr(tokenizer, role, None)) for role in _ROLES}
    found = []
    for name, number in tokenizer.get_vocab().items():
        match = _RESERVED.fullmatch(name)
        if match and name not in roles and name not in used:
            found.append((int(match[1]), number))
    return [number for _, number in sorted(found, reverse=True)]


def trained_ids(tokenizer: Any) -> np.ndarray:
    """Return the sorted ids that text or chat may have trained: the vocabulary without its unused entries."""
    return np.setdiff1d(list(tokenizer.get_vocab().values()), spare_ids(tokenizer))


def _rename(tokenizer: Any, names: dict[int, str]) -> None:
    """Rename entries of the vocabulary and make them special."""
    if not names:
        return
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    old_names = {tokenizer.convert_ids_to_tokens(number): name for number, name in names.items()}
    vocabulary = definition["model"]["vocab"]
    if isinstance(vocabulary, dict):
        renamed: Any = {old_names.get(name, name): number for name, number in vocabulary.items()}
    else:
        renamed = [[old_names.get(name, name), score] for name, score in vocabulary]
    definition["model"]["vocab"] = renamed
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    others = [token for token in definition["added_tokens"] if token["id"] not in names]
    added = [{"id": number, "content": name} | flags for number, name in names.items()]
    definition["added_tokens"] = sorted(others + added, key=lambda token: int(token["id"]))
    backend = Tokenizer.from_str(json.dumps(definition, ensure_ascii=False))
    backend.encode_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens
    tokenizer._tokenizer = backend
    # A separate list of special tokens, besides tokenizer.json, would restore the old names on loading, as new tokens.
    extra = [str(token) for token in tokenizer._extra_special_tokens]
    tokenizer._extra_special_tokens = [old_names.get(token, token) for token in extra]


# The labels of tangled pieces: six random letters and digits, tokenized.


LABEL_CHARS = 6
_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
_AT_ONCE = 1024

DrawLabels = Callable[[int, np.random.Generator], Sequence[np.ndarray]]


def label_drawer(encoder: Encoder) -> DrawLabels:
    """Return a function that draws the requested number of labels, tokenized."""

    def draw(count: int, rng: np.random.Generator) -> list[np.ndarray]:
        drawn = _ALPHABET[rng.integers(len(_ALPHABET), size=(count, LABEL_CHARS))]
        return encoder.encode_plain([label.tobytes().decode() for label in drawn])

    return draw


class LabelPool:
    """An endless stream of numbered labels; `tokens` and `starts` hold their tokens."""

    def __init__(self, draw: DrawLabels, half: int, rng: np.random.Generator) -> None:
        self._draw, self._rng = draw, rng
        self._half = -(-half // _AT_ONCE) * _AT_ONCE
        self._next = np.zeros(0, dtype=np.int64)
        self._passes = 0  # over half of the pool
        self.tokens = np.zeros(0, dtype=np.uint32)
        self.starts = np.zeros(1, dtype=np.int64)  # label i is tokens[starts[i] : starts[i + 1]]

    def take(self, count: int) -> np.ndarray:
        """Return the next labels."""
        while len(self._next) < count:
            self._next = np.concatenate([self._next, self._more()])
        taken, self._next = np.split(self._next, [count])
        return taken

    def __len__(self) -> int:
        """Number of labels drawn so far."""
        return len(self.starts) - 1

    def lens(self, labels: np.ndarray) -> np.ndarray:
        lens: np.ndarray = self.starts[labels + 1] - self.starts[labels]
        return lens

    def _more(self) -> np.ndarray:
        known = len(self)
        if known < 2 * self._half:
            fresh = self._draw(_AT_ONCE, self._rng)
            self.tokens = np.concatenate([self.tokens, *fresh])
            ends = self.starts[-1] + np.cumsum([len(label) for label in fresh])
            self.starts = np.concatenate([self.starts, ends])
            return np.arange(known, known + _AT_ONCE)
        # The two halves alternate, so that a label repeats only after at least half a pool of others.
        begin = self._half * (self._passes % 2)
        self._passes += 1
        return begin + self._rng.permutation(self._half)
