"""Turn texts into token arrays with the model's own tokenizer.

In: texts. Out: one uint32 array per text: the tokenizer's own beginning (if it has one), the text, one EOS.
Promise: text is only text. A document that spells "<|endoftext|>" gets the tokens of those
characters, never the control token, so no document can end or open another. The route changes the
speed, never an id, so it is no part of the digest.
Elsewhere: choosing the route (fast_tokens.py), reading (readers/), the tokens that tangling adds (knots.py).
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from unspool.base.artefact import digest
from unspool.base.errors import ConfigError
from unspool.data.tokens_checked import load_checked
from unspool.data.tokens_plain import NotFastError, load_reference

# Only to name the type: importing it takes seconds, which every worker process would pay.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Encoder:
    """What tokenising needs of a tokenizer; small to send to worker processes, which load what they need of it."""

    definition: str  # the content of tokenizer.json
    bos: tuple[int, ...]
    eos: int
    route: str = "tokenizers"  # or gigatoken, tiktoken: only as `choose_route` says
    why: str = ""  # of the route, for people

    @cached_property
    def digest(self) -> str:
        return digest([self.definition, self.bos, self.eos])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Whole documents: begun as the tokenizer begins them, ended by one EOS."""
        begin, end = np.array(self.bos, dtype=np.uint32), np.array([self.eos], dtype=np.uint32)
        return [np.concatenate([begin, ids, end]) for ids in self.encode_plain(texts)]

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Only the texts' own tokens."""
        if self.route == "tokenizers":
            encodings = load_reference(self.definition).encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        try:
            engine = load_checked(self.definition, self.route)
        except NotFastError as refusal:
            raise ConfigError(
                f"tokenising: {self.route} was chosen but does not work in this process ({refusal}); "
                "install the same packages on every machine."
            ) from refusal
        return [engine.encode(text) for text in texts]


def build_encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """An encoder that shares nothing with `tokenizer`; ConfigError if documents could not be ended."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"tokenizer {tokenizer.name_or_path!r} has no EOS token, so documents could not be told apart; "
            "set eos_token in its tokenizer_config.json."
        )
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    plain = backend.encode("a", add_special_tokens=False).ids
    dressed = backend.encode("a", add_special_tokens=True).ids
    begun = next(at for at in range(len(dressed) + 1) if dressed[at : at + len(plain)] == plain)
    return Encoder(backend.to_str(), tuple(dressed[:begun]), int(tokenizer.eos_token_id))


def forget_engines() -> None:
    """Give back the memory of loaded tokenizers, hundreds of megabytes that a process keeps while its workers work."""
    load_checked.cache_clear()
    load_reference.cache_clear()
    gc.collect()
    # Only the C library knows how to return what was freed; others keep it, which costs memory and nothing else.
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
