"""Turn texts into token arrays with the model's own tokenizer, through the fastest engine that gives the same ids.

A document becomes one uint32 array: the tokenizer's own beginning (if it has one), the text, one EOS. Text is never
parsed for control tokens: "<|endoftext|>" in a document gets the tokens of those characters. The engine changes the
speed but no id, so it is not part of the digest.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import platform
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.data.tokenize.fast import (
    ENGINES,
    NotFastError,
    PlainDefinition,
    build_plain,
    load_reference,
    pre_tokenizer_parts,
)

logger = logging.getLogger(__name__)

# One passage of `_PASSAGE` characters in every `_STRIDE` is compared with the tokenizer.
_STRIDE = 1 << 20
_PASSAGE = 1000
# Number of characters that are checked at once; limits memory for a long text.
_PIECE = 1 << 20
_ASCII = bytes(range(128))
_UNTESTED, _SAME, _DIFFERENT = range(3)


class CheckedEngine:
    """A fast engine whose ids are compared with the tokenizer's; the tokenizer encodes texts that it cannot."""

    def __init__(self, definition: str, route: str) -> None:
        plain = build_plain(definition)
        self.route = route
        self.fallback_chars = 0  # characters of texts that the tokenizer encoded
        self._engine = ENGINES[route](plain)
        self._plain = plain
        self._token_bytes = _token_bytes(plain)
        self._normalizes = plain.definition["normalizer"] is not None
        self._reference = load_reference(definition)
        self._tested = np.zeros(0x110000, dtype=np.uint8)

    def encode(self, text: str) -> np.ndarray:
        ids = self._fast(text) if self._has_known_characters(text) else None
        if ids is None:
            self.fallback_chars += len(text)
            return self._slow(text)
        for passage in passages(text):
            self._compare(passage)
        return ids

    def _slow(self, text: str) -> np.ndarray:
        return np.array(self._reference.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    def _fast(self, text: str) -> np.ndarray | None:
        """Return the engine's ids; None if it rejects the text or lost bytes of it."""
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
            results = self._tested[codes]
            if (results == _SAME).all():
                continue
            self._test_characters(np.unique(codes[results == _UNTESTED]))
            if (self._tested[codes] == _DIFFERENT).any():
                return False
        return True

    def _test_characters(self, codes: np.ndarray) -> None:
        contexts = [in_contexts(chr(code)) for code in codes.tolist()]
        encodings = self._reference.encode_batch_fast(contexts, add_special_tokens=False)
        for code, context, encoding in zip(codes, contexts, encodings, strict=True):
            ids = self._fast(context)
            self._tested[code] = _SAME if ids is not None and ids.tolist() == encoding.ids else _DIFFERENT

    def _compare(self, passage: str) -> None:
        ids = self._fast(passage)
        if ids is not None and not np.array_equal(ids, self._slow(passage)):
            raise DataError(
                f"tokenizing: {self.route} and the model's own tokenizer disagree on the passage {passage[:60]!r}…, "
                f"although they agreed on the sample; uninstall the package {self.route} and run again."
            )


@lru_cache(maxsize=2)
def load_checked(definition: str, route: str) -> CheckedEngine:
    """Load an engine, once per process; NotFastError if it does not support this tokenizer."""
    return CheckedEngine(definition, route)


def passages(text: str) -> Iterator[str]:
    """Yield the passages of a text to compare: on average one per `_STRIDE` characters."""
    mark = zlib.crc32(f"{len(text)} {text[:200]} {text[-200:]}".encode())
    for number in range((len(text) + mark % _STRIDE) // _STRIDE):
        start = int(rng_for(mark, "passage", number).integers(max(1, len(text) - _PASSAGE + 1)))
        yield text[start : start + _PASSAGE]


def in_contexts(char: str) -> str:
    """Put a character into contexts whose tokens depend on the class of the character."""
    return (
        f"a{char}b {char} 1{char}2345 {char}z .{char}.com\n{char}\n{char}{char}\\n \u0301{char}(x "
        f"e{char}\u0323\u0301 '{char}s  {char}the{char}THE"
    )


def _token_bytes(plain: PlainDefinition) -> np.ndarray | None:
    """Return the number of text bytes of each id; None if the vocabulary is not byte-level."""
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


# Importing this takes seconds, in every worker process.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Encoder:
    """A tokenizer's definition, picklable for worker processes, which load an engine from it."""

    definition: str  # the content of tokenizer.json
    bos: tuple[int, ...]
    eos: int
    route: str = "tokenizers"  # or gigatoken, tiktoken; set by `choose_route`
    why: str = ""  # why this route was chosen

    @cached_property
    def digest(self) -> str:
        return digest([self.definition, self.bos, self.eos])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode whole documents, with the tokenizer's own beginning and one EOS."""
        begin, end = np.array(self.bos, dtype=np.uint32), np.array([self.eos], dtype=np.uint32)
        return [np.concatenate([begin, ids, end]) for ids in self.encode_plain(texts)]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> dict[str, Any]:
        """Tokenize like a Hugging Face tokenizer, for code that accepts either."""
        assert not add_special_tokens
        return {"input_ids": self.encode_plain(texts)}

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts without BOS and EOS."""
        if self.route == "tokenizers":
            encodings = load_reference(self.definition).encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        try:
            engine = load_checked(self.definition, self.route)
        except NotFastError as refusal:
            raise ConfigError(
                f"tokenizing: {self.route} works on the main machine but not in this process ({refusal}); "
                "install the same packages on every machine."
            ) from refusal
        return [engine.encode(text) for text in texts]


def build_encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Build an encoder that shares no state with `tokenizer`; ConfigError if there is no EOS token."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer {tokenizer.name_or_path!r} has no EOS token to end documents with; "
            "set eos_token in its tokenizer_config.json."
        )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next(at for at in range(len(full) + 1) if full[at : at + len(plain)] == plain)
    return Encoder(backend.to_str(), tuple(full[:start]), int(tokenizer.eos_token_id))


def forget_engines() -> None:
    """Free loaded tokenizers: hundreds of megabytes that this process does not need while its workers run."""
    load_checked.cache_clear()
    load_reference.cache_clear()
    gc.collect()
    # glibc returns freed memory to the system only on request.
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


# Choose the fastest engine that gives the tokenizer's ids on this data


# An engine that leaves a larger share of the sample to the tokenizer is not used.
_MAX_FALLBACK = 0.5

_HARD_TEXTS = (
    "",
    " ",
    "\n",
    "\x00",
    "  two  spaces   three\t\ttabs \r\n\r\nlines\n\n\n   end  ",
    "I'll we've they're it's don't I'm he'd I'LL WE'VE 'tis ''s 'ſ",
    "1 12 123 1234567 3.14 1,000 x2y ½ ² ٣٤ Ⅷ 一二 v1.2.3 0x1F",
    "e\u0301 é \u1e9b\u0323 각 \u1100\u1161\u11a8 A\u030a \u212b ﬁ",
    "naïve Привет 你好，世界 こんにちは שָׁלוֹם नमस्ते สวัสดี 👩‍👩‍👧‍👦 🇩🇪 👍🏽 \ufeff\u200b\u00a0\u2028x",
    "def f(x):\n    return {'a': [x**2, -x]}  # ok\n\tpass\n</div><br/>\\n\\t$$\\frac{1}{2}$$ --- ... !!!???",
    "a" * 2000,
    " " * 2000 + "x",
    "\n" * 2000,
)


def choose_route(encoder: Encoder, sample: Sequence[str]) -> Encoder:
    """Set the encoder's `route` and `why`, checked on `sample`: 1 to 2 MB of texts from across the source."""
    hard = list(_hard_texts(encoder))
    truth = replace(encoder, route="tokenizers")
    hard_ids, sample_ids = truth.encode_plain(hard), truth.encode_plain(sample)
    refusals: list[str] = []
    for route in ENGINES:
        try:
            _check_ids(encoder, route, hard, hard_ids)
            fallback = _check_ids(encoder, route, sample, sample_ids)
            if fallback > _MAX_FALLBACK:
                raise NotFastError(f"it cannot encode {fallback:.0%} of the sample")
        except NotFastError as refusal:
            refusals.append(f"not {route}: {refusal}")
            continue
        millions = sum(map(len, sample)) / 1e6
        agreed = f"{route} gives the tokenizer's own ids on {len(sample)} sample documents ({millions:.1f}M characters)"
        return replace(encoder, route=route, why="; ".join([*refusals, agreed]))
    why = "; ".join(refusals)
    logger.warning(f"tokenizing with the tokenizers library, which takes several times longer: {why}")
    return replace(encoder, route="tokenizers", why=why)


def _check_ids(encoder: Encoder, route: str, texts: Sequence[str], expected: Sequence[np.ndarray]) -> float:
    """Raise NotFastError unless the route gives the expected ids; return the share left to the tokenizer."""
    engine = load_checked(encoder.definition, route)
    before = engine.fallback_chars
    for text, ids in zip(texts, expected, strict=True):
        if not np.array_equal(engine.encode(text), ids):
            raise NotFastError(f"its ids differ on the text that begins {text[:40]!r}")
    return (engine.fallback_chars - before) / max(1, sum(map(len, texts)))


def _hard_texts(encoder: Encoder) -> Iterator[str]:
    """Yield texts on which engines are known to differ: ASCII in many contexts, runs, combining marks, added tokens."""
    yield from _HARD_TEXTS
    yield from (in_contexts(chr(code)) for code in range(128))
    for token in json.loads(encoder.definition)["added_tokens"]:
        name = token["content"]
        yield f"{name} a{name}b {name}{name} {name[:-1]} {name}\u0338 \n{name}\n1{name}2  {name}  é{name}"
