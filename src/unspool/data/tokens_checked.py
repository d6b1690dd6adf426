"""A fast engine, watched: every text gets the ids that the tokenizer itself would give.

In: texts. Out: ids. Three watches go on for as long as texts come, because a sample cannot show everything:
- Every character beyond ASCII is tried in both, once, when first seen: Unicode versions disagree about
  rare letters, digits and marks. A text that holds one on which they differ goes to the tokenizer.
- The tokens of a text must be as long as the text, so that nothing was lost.
- A thousandth of all text, chosen by the documents themselves, is tokenised by both and compared.
Promise: what a text gets depends on that text alone, not on the batch or process it came in.
Price: a text that the engine cannot do runs at the tokenizer's own speed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from unspool.base.errors import DataError
from unspool.base.rng import rng_for
from unspool.data.tokens_engines import ENGINES
from unspool.data.tokens_plain import NotFastError, Plain, build_plain, load_reference, pre_tokenizer_parts

# One passage of `_PASSAGE` characters is compared in every `_STRIDE`.
_STRIDE = 1 << 20
_PASSAGE = 1000
# Characters looked at in one go: bounds the memory that a long text takes.
_PIECE = 1 << 20
_ASCII = bytes(range(128))
_UNTRIED, _SAME, _DIFFERENT = range(3)


class CheckedEngine:
    def __init__(self, definition: str, route: str) -> None:
        plain = build_plain(definition)
        self.route = route
        self.chars_left_over = 0  # characters of texts that went to the tokenizer
        self._engine = ENGINES[route](plain)
        self._plain = plain
        self._token_bytes = _token_bytes(plain)
        self._normalizes = plain.definition["normalizer"] is not None
        self._reference = load_reference(definition)
        self._tried = np.zeros(0x110000, dtype=np.uint8)

    def encode(self, text: str) -> np.ndarray:
        ids = self._fast(text) if self._has_known_characters(text) else None
        if ids is None:
            self.chars_left_over += len(text)
            return self._slow(text)
        for passage in passages(text):
            self._compare(passage)
        return ids

    def _slow(self, text: str) -> np.ndarray:
        return np.array(self._reference.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    def _fast(self, text: str) -> np.ndarray | None:
        """The engine's ids; None if it refuses or has visibly lost something."""
        try:
            ids = self._engine.encode(text)
            if self._has_lost_bytes(text, ids):
                return None
            return self._plain.real_ids(ids)
        except NotFastError:
            return None

    def _has_lost_bytes(self, text: str, ids: np.ndarray) -> bool:
        if self._token_bytes is None or (self._normalizes and not text.isascii()):
            return False
        num_bytes = len(text) if text.isascii() else len(text.encode())
        return int(self._token_bytes[ids].sum()) != num_bytes

    def _has_known_characters(self, text: str) -> bool:
        if text.isascii():
            return True
        others = text.encode().translate(None, delete=_ASCII).decode()
        for start in range(0, len(others), _PIECE):
            codes = np.frombuffer(others[start : start + _PIECE].encode("utf-32-le"), dtype=np.uint32)
            results = self._tried[codes]
            if (results == _SAME).all():
                continue
            self._try_characters(np.unique(codes[results == _UNTRIED]))
            if (self._tried[codes] == _DIFFERENT).any():
                return False
        return True

    def _try_characters(self, codes: np.ndarray) -> None:
        contexts = [in_contexts(chr(code)) for code in codes.tolist()]
        encodings = self._reference.encode_batch_fast(contexts, add_special_tokens=False)
        for code, context, encoding in zip(codes, contexts, encodings, strict=True):
            ids = self._fast(context)
            self._tried[code] = _SAME if ids is not None and ids.tolist() == encoding.ids else _DIFFERENT

    def _compare(self, passage: str) -> None:
        ids = self._fast(passage)
        if ids is not None and not np.array_equal(ids, self._slow(passage)):
            raise DataError(
                f"tokenising: {self.route} and the model's own tokenizer disagree on the passage {passage[:60]!r}…, "
                f"although they agreed on the sample; remove the package {self.route} and run again to do without it."
            )


@lru_cache(maxsize=2)
def load_checked(definition: str, route: str) -> CheckedEngine:
    """Loaded once per process; NotFastError if this route cannot serve this tokenizer."""
    return CheckedEngine(definition, route)


def passages(text: str) -> Iterator[str]:
    """The passages of a text that are compared: on average one in every `_STRIDE` characters."""
    mark = zlib.crc32(f"{len(text)} {text[:200]} {text[-200:]}".encode())
    for number in range((len(text) + mark % _STRIDE) // _STRIDE):
        start = int(rng_for(mark, "passage", number).integers(max(1, len(text) - _PASSAGE + 1)))
        yield text[start : start + _PASSAGE]


def in_contexts(char: str) -> str:
    """A character in surroundings whose own tokens depend on what kind of character it is taken for."""
    return (
        f"a{char}b {char} 1{char}2345 {char}z .{char}.com\n{char}\n{char}{char}\\n \u0301{char}(x "
        f"e{char}\u0323\u0301 '{char}s  {char}the{char}THE"
    )


def _token_bytes(plain: Plain) -> np.ndarray | None:
    """How many bytes of text each id stands for; None if text is spelled otherwise than by bytes."""
    parts = pre_tokenizer_parts(plain.definition)
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1]["add_prefix_space"]:
        return None
    vocab = plain.definition["model"]["vocab"]
    added = {token["id"]: len(token["content"].encode()) for token in plain.definition["added_tokens"]}
    lengths = np.zeros(max([*vocab.values(), *added]) + 1, dtype=np.int64)
    for token, number in vocab.items():
        lengths[number] = len(token)  # one letter is one byte
    for number, length in added.items():
        lengths[number] = length
    return lengths
