"""How many tokens a text has, exactly and fast.

In: a tokenizer, texts of the kind that will be counted. Out: counts.
Promise: the number that the tokenizer itself gives: the fast routes of data/fast_tokens.py are taken only where they
agree with it.
"""

from collections.abc import Sequence
from typing import Any

from unspool.base.errors import ConfigError
from unspool.data.fast_tokens import choose_route
from unspool.data.tokens import Encoder, build_encoder
from unspool.eval.prompt import encode


class Counter:
    def __init__(self, tokenizer: Any, sample: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._encoder = _encoder(tokenizer, sample)

    def count(self, text: str) -> int:
        if self._encoder is None:
            return len(encode(self._tokenizer, text))
        return len(self._encoder.encode_plain([text])[0])


def _encoder(tokenizer: Any, sample: Sequence[str]) -> Encoder | None:
    """None for tokenizers that know no fast route: slow ones, or without an end of text."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    try:
        return choose_route(build_encoder(tokenizer), sample)
    except ConfigError:
        return None
