"""Fast tokenizer engines: gigatoken, and tiktoken on the same merges.

An engine gets a rewritten tokenizer definition; its `encode` returns one text's ids or raises NotFastError. It uses
only the caller's thread, because worker processes already share the cores. Memory stays limited on text that never
repeats a word. This module does not guarantee that ids equal the tokenizer's; encoder.py compares them.
"""

from __future__ import annotations

import importlib
import json
import os
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from tokenizers import Tokenizer

# No numeric character is above it (Unicode 16); encoder.py would detect one at its first occurrence.
_LAST_NUMERIC = 0x1FFFF


class NotFastError(Exception):
    """A tokenizer or text that an engine does not support; the message says why."""


@dataclass(frozen=True)
class PlainDefinition:
    """A tokenizer's definition, rewritten so that engines accept it and treat control tokens as text."""

    definition: dict[str, Any]
    first_extra: int  # this and all higher ids are added by the rewriting
    replacements: dict[int, np.ndarray]  # real ids of the extra ids; a missing id has none

    def real_ids(self, ids: np.ndarray) -> np.ndarray:
        """Replace the extra ids; NotFastError if that is impossible."""
        places = np.flatnonzero(ids >= self.first_extra)
        if not len(places):
            return ids
        parts: list[np.ndarray] = []
        done = 0
        for place in places.tolist():
            real = self.replacements.get(int(ids[place]))
            if real is None:
                # The tokenizer skips such a byte and may then join its neighbors.
                raise NotFastError("it holds a byte that the vocabulary lacks")
            parts += [ids[done:place], real]
            done = place + 1
        return np.concatenate([*parts, ids[done:]])


@lru_cache(maxsize=2)
def load_reference(definition: str) -> Tokenizer:
    """Load the tokenizer itself, once per process; it treats control tokens in text as text."""
    reference = Tokenizer.from_str(definition)
    reference.encode_special_tokens = True
    return reference


def byte_letters() -> list[str]:
    """Return the letter of byte-level vocabularies for each byte: itself if printable, else one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def pre_tokenizer_parts(definition: dict[str, Any]) -> list[dict[str, Any]]:
    top = definition["pre_tokenizer"]
    if top is None:
        return []
    return list(top["pretokenizers"]) if top["type"] == "Sequence" else [top]


def build_plain(definition: str) -> PlainDefinition:
    """Rewrite a definition; the engines check whether they support the rest of it."""
    plain = json.loads(definition)
    _drop_no_ops(plain)
    used = [token["id"] for token in plain["added_tokens"]]
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["special"]]
    vocab = plain["model"]["vocab"]
    if plain["model"]["type"] != "BPE":
        return PlainDefinition(plain, np.iinfo(np.uint32).max, {})
    first_extra = max([*vocab.values(), *used]) + 1
    replacements: dict[int, np.ndarray] = {}
    next_id = first_extra

    parts = pre_tokenizer_parts(plain)
    if parts and parts[-1]["type"] == "ByteLevel":
        for letter in byte_letters():
            if letter not in vocab:
                vocab[letter] = next_id
                next_id += 1
    if parts and parts[0] == {"type": "Digits", "individual_digits": True} and plain["normalizer"] is None:
        plain["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts[1:]} if parts[2:] else parts[1]
        for digit, ids in _digits(definition).items():
            if len(ids) == 1:
                extra_id = int(ids[0])
            else:
                extra_id = next_id
                replacements[extra_id] = ids
                next_id += 1
            plain["added_tokens"].append(_added_token(digit, extra_id))
    return PlainDefinition(plain, first_extra, replacements)


def _drop_no_ops(plain: dict[str, Any]) -> None:
    """Drop settings without effect, which some versions of `transformers` write for GGUF files."""
    if plain["normalizer"] == {"type": "Sequence", "normalizers": []}:
        plain["normalizer"] = None
    model = plain["model"]
    if model.get("byte_fallback") and not any(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        model["byte_fallback"] = False


def _digits(definition: str) -> dict[str, np.ndarray]:
    """Return the ids of every numeric character; such a tokenizer never joins them with other characters."""
    digits = [char for char in map(chr, range(_LAST_NUMERIC + 1)) if unicodedata.category(char).startswith("N")]
    encodings = load_reference(definition).encode_batch_fast(digits, add_special_tokens=False)
    return {digit: np.array(encoding.ids, dtype=np.uint32) for digit, encoding in zip(digits, encodings, strict=True)}


def _added_token(content: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token, "content": content, **flags}


# gigatoken caches every word. Interval of memory checks, and the growth that clears the cache.
_CHECK_EVERY_CHARS = 32 << 20
_GROWTH_BYTES = 256 << 20

# The pattern that ByteLevel(use_regex=True) splits by.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

Result = TypeVar("Result")


class Engine(Protocol):
    def encode(self, text: str) -> np.ndarray: ...


class Gigatoken:
    """Byte-level and SentencePiece BPE with a pre-tokenizer that gigatoken knows."""

    def __init__(self, plain: PlainDefinition) -> None:
        self._module = _import("gigatoken")
        self._definition = json.dumps(plain.definition, ensure_ascii=False)
        self._load()

    def _load(self) -> None:
        self._tokenizer = _guarded(lambda: self._module.Tokenizer.from_json(self._definition))
        self._chars = 0
        self._memory = _resident_bytes()

    def encode(self, text: str) -> np.ndarray:
        if self._chars >= _CHECK_EVERY_CHARS:
            self._clear_cache_if_large()
        self._chars += len(text)
        ids: np.ndarray = _guarded(lambda: self._tokenizer.encode(text))
        return ids

    def _clear_cache_if_large(self) -> None:
        self._chars = 0
        memory = _resident_bytes()
        if memory is None or self._memory is None or memory - self._memory > _GROWTH_BYTES:
            del self._tokenizer
            self._load()


class Tiktoken:
    """Byte-level BPE with one regular expression.

    tiktoken joins any two tokens that together spell a token; the tokenizer joins only pairs in its list. They agree if
    every token's spelling is tokenized to that token. Then two neighbors that spell a token come from its bytes alone,
    so they are the pair that the tokenizer joins. `_check_reachable` checks this.
    """

    def __init__(self, plain: PlainDefinition) -> None:
        module = _import("tiktoken")
        definition = plain.definition
        added = _added_ids(definition)
        ranks, ids = _ranks(definition)
        _check_reachable(definition)
        self._names = set(added)
        self._ids = np.array([*ids, *added.values()], dtype=np.uint32)
        self._normalize = _normalizer(definition)
        encoding = _guarded(
            lambda: module.Encoding(
                "unspool",
                pat_str=_pattern(definition),
                mergeable_ranks=ranks,
                special_tokens={name: len(ids) + at for at, name in enumerate(added)},
            )
        )
        self._encode = encoding.encode_to_numpy

    def encode(self, text: str) -> np.ndarray:
        if self._normalize is not None and not text.isascii():
            if any(name in text for name in self._names):
                # The tokenizer finds added tokens before it normalizes; a combining mark after one may then merge with
                # it.
                raise NotFastError("it spells an added token among characters that may need normalizing")
            text = self._normalize(text)
        ranks = _guarded(lambda: self._encode(text, allowed_special=self._names, disallowed_special=()))
        ids: np.ndarray = self._ids[ranks]
        return ids


ENGINES: dict[str, Callable[[PlainDefinition], Engine]] = {"gigatoken": Gigatoken, "tiktoken": Tiktoken}


def _added_ids(definition: dict[str, Any]) -> dict[str, int]:
    tokens = definition["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in tokens):
        raise NotFastError("some added tokens include the spaces around them or match only whole words")
    names = sorted(token["content"] for token in tokens)
    if any(later.startswith(name) for name, later in pairwise(names)):
        raise NotFastError("one of its added tokens is a prefix of another")
    return {token["content"]: token["id"] for token in tokens}


def _ranks(definition: dict[str, Any]) -> tuple[dict[bytes, int], list[int]]:
    """Return the rank of every token, in the order of the merges, and the id of every rank."""
    model = definition["model"]
    if model["type"] != "BPE" or any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise NotFastError("its model is not plain byte-level BPE")
    letters = byte_letters()
    if any(letter not in model["vocab"] for letter in letters):
        raise NotFastError("its model is not byte-level")
    byte_of = {letter: byte for byte, letter in enumerate(letters)}
    ranks = {bytes([byte]): byte for byte in range(256)}
    ids = [model["vocab"][letter] for letter in letters]
    last = b""
    for left, right in _merges(definition):
        if not byte_of.keys() >= set(left + right):
            raise NotFastError("its model is not byte-level")
        token = bytes(byte_of[letter] for letter in left + right)
        if token not in ranks:
            ranks[token] = len(ids)
            ids.append(model["vocab"][left + right])
        elif token != last:
            raise NotFastError("its merges make one token at several ranks")
        last = token
    added = [token["id"] for token in definition["added_tokens"]]
    if model.get("ignore_merges") and not set(model["vocab"].values()) <= {*ids, *added}:
        raise NotFastError("no merges lead to some entries of its vocabulary")
    return ranks, ids


def _check_reachable(definition: dict[str, Any]) -> None:
    model = {**definition["model"], "ignore_merges": False}
    bpe = Tokenizer.from_str(json.dumps({**definition, "added_tokens": [], "model": model})).model
    listed = dict.fromkeys(_merges(definition))
    whole_words = bool(definition["model"].get("ignore_merges"))
    for token in dict.fromkeys(left + right for left, right in listed):
        # If whole words are looked up before merging (Llama-3), it is enough that every pair that spells the token is
        # listed.
        if len(bpe.tokenize(token)) != 1 and not (whole_words and _all_pairs(token, model["vocab"]) <= listed.keys()):
            raise NotFastError(f"its merges do not build the token {token!r} from its bytes")


def _all_pairs(token: str, vocab: dict[str, int]) -> set[tuple[str, str]]:
    pairs = {(token[:cut], token[cut:]) for cut in range(1, len(token))}
    return {(left, right) for left, right in pairs if left in vocab and right in vocab}


def _merges(definition: dict[str, Any]) -> list[tuple[str, str]]:
    # Old files store a pair as one string.
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in definition["model"]["merges"])
    return [(left, right) for left, right in pairs]


def _pattern(definition: dict[str, Any]) -> str:
    parts = pre_tokenizer_parts(definition)
    byte_level = parts[-1] if parts else {"type": None}
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        raise NotFastError("its pre-tokenizer is not plain byte-level")
    if len(parts) == 1 and byte_level["use_regex"]:
        return _GPT2_PATTERN
    if len(parts) == 2 and parts[0]["type"] == "Split" and not byte_level["use_regex"]:
        split = parts[0]
        # Text that no match covers is lost here; encoder.py detects the missing bytes.
        if (split["behavior"], split["invert"]) in {("Isolated", False), ("Removed", True)}:
            pattern: str | None = split["pattern"].get("Regex")
            if pattern is not None:
                return pattern
    raise NotFastError("its pre-tokenizer is not a single regular expression")


def _normalizer(definition: dict[str, Any]) -> Callable[[str], str] | None:
    if definition["normalizer"] is None:
        return None
    if definition["normalizer"]["type"] != "NFC":
        raise NotFastError(f"it normalizes text by {definition['normalizer']['type']}")
    # Use the tokenizer's own normalizer, because Unicode versions differ in rare marks.
    normalizer = Tokenizer.from_str(json.dumps(definition)).normalizer
    return lambda text: str(normalizer.normalize_str(text))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotFastError(f"the package {name} cannot be imported ({error})") from error


def _guarded(call: Callable[[], Result]) -> Result:
    """Call the engine; its errors, including panics of its Rust code, become NotFastError."""
    try:
        return call()
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise NotFastError(str(error).splitlines()[0]) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise NotFastError(f"it failed ({error})") from error


def _resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system does not report it."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGESIZE")
