"""Rewrite a tokenizer's definition so that fast engines accept it and read text as only text.

In: the content of a tokenizer.json. Out: `Plain`: a definition, and what its made-up ids stand for.
Four things change. What does nothing, such as an empty list of normalisers, goes, since engines refuse all that they do
not know. Control tokens are no longer looked for. Bytes that the vocabulary lacks get
made-up ids, because engines want all 256. Digits that stand alone (SmolLM2) become added tokens: text is
cut at added tokens before anything else, which is just what `Digits(individual_digits=True)` does.
Elsewhere: the engines (tokens_engines.py), when their ids may be trusted (tokens_checked.py).
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

# No numeric character lies above it (Unicode 16); one that did would be caught when first seen in a text.
_LAST_NUMERIC = 0x1FFFF


class NotFastError(Exception):
    """This tokenizer, or this text, is beyond a fast route; the message says why, for people."""


@dataclass(frozen=True)
class Plain:
    definition: dict[str, Any]
    first_made_up: int  # this and all higher ids are made up
    stands_for: dict[int, np.ndarray]  # of the made-up ids; one that is missing here has no equivalent

    def real_ids(self, ids: np.ndarray) -> np.ndarray:
        """The ids with the made-up ones replaced; NotFastError where that is impossible."""
        places = np.flatnonzero(ids >= self.first_made_up)
        if not len(places):
            return ids
        parts: list[np.ndarray] = []
        done = 0
        for place in places.tolist():
            real = self.stands_for.get(int(ids[place]))
            if real is None:
                # The tokenizer skips such a byte and may then join what stood on either side of it.
                raise NotFastError("it holds a byte that the vocabulary lacks")
            parts += [ids[done:place], real]
            done = place + 1
        return np.concatenate([*parts, ids[done:]])


@lru_cache(maxsize=2)
def load_reference(definition: str) -> Tokenizer:
    """The tokenizer itself, told that text is only text; loaded once per process."""
    reference = Tokenizer.from_str(definition)
    reference.encode_special_tokens = True
    return reference


def byte_letters() -> list[str]:
    """The letter that byte-level vocabularies write for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def pre_tokenizer_parts(definition: dict[str, Any]) -> list[dict[str, Any]]:
    top = definition["pre_tokenizer"]
    if top is None:
        return []
    return list(top["pretokenizers"]) if top["type"] == "Sequence" else [top]


def build_plain(definition: str) -> Plain:
    """The rewritten definition; other properties of the tokenizer are left for the engines to judge."""
    plain = json.loads(definition)
    _drop_what_does_nothing(plain)
    used = [token["id"] for token in plain["added_tokens"]]
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["special"]]
    vocab = plain["model"]["vocab"]
    if plain["model"]["type"] != "BPE":
        return Plain(plain, np.iinfo(np.uint32).max, {})
    first_made_up = max([*vocab.values(), *used]) + 1
    stands_for: dict[int, np.ndarray] = {}
    next_id = first_made_up

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
                stand_in = int(ids[0])
            else:
                stand_in = next_id
                stands_for[stand_in] = ids
                next_id += 1
            plain["added_tokens"].append(_added_token(digit, stand_in))
    return Plain(plain, first_made_up, stands_for)


def _drop_what_does_nothing(plain: dict[str, Any]) -> None:
    """As in tokenizers that some versions of `transformers` make of GGUF files."""
    if plain["normalizer"] == {"type": "Sequence", "normalizers": []}:
        plain["normalizer"] = None
    model = plain["model"]
    if model.get("byte_fallback") and not any(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        model["byte_fallback"] = False


def _digits(definition: str) -> dict[str, np.ndarray]:
    """The ids of every numeric character; alone, because such a tokenizer never joins them with anything."""
    digits = [char for char in map(chr, range(_LAST_NUMERIC + 1)) if unicodedata.category(char).startswith("N")]
    encodings = load_reference(definition).encode_batch_fast(digits, add_special_tokens=False)
    return {digit: np.array(encoding.ids, dtype=np.uint32) for digit, encoding in zip(digits, encodings, strict=True)}


def _added_token(content: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token, "content": content, **flags}
