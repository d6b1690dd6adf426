"""Choose how to tokenise: the fastest way that gives this tokenizer's ids on this very data.

In: an encoder, some of the source's own texts. Out: the encoder with its route, and why.
Routes, fastest first: gigatoken, tiktoken on the same merges, tokenizers. All give the same ids; a route that
differs anywhere on the sample, or on what the tokenizer itself suggests as hard, is not taken.
Elsewhere: the watch over texts outside the sample (tokens_checked.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from unspool.base.progress import say
from unspool.data.tokens import Encoder
from unspool.data.tokens_checked import in_contexts, load_checked
from unspool.data.tokens_engines import ENGINES
from unspool.data.tokens_plain import NotFastError

# A route that leaves more than this share of the sample to the tokenizer is not worth its name.
_MAX_LEFT_OVER = 0.5

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
    """The encoder with `route` and `why` set, checked on `sample`: 1 to 2 MB of texts from all over the source."""
    hard = list(_hard_texts(encoder))
    truth = replace(encoder, route="tokenizers")
    hard_ids, sample_ids = truth.encode_plain(hard), truth.encode_plain(sample)
    refusals: list[str] = []
    for route in ENGINES:
        try:
            _check_ids(encoder, route, hard, hard_ids)
            left_over = _check_ids(encoder, route, sample, sample_ids)
            if left_over > _MAX_LEFT_OVER:
                raise NotFastError(f"it cannot do {left_over:.0%} of the sample")
        except NotFastError as refusal:
            refusals.append(f"not {route}: {refusal}")
            continue
        millions = sum(map(len, sample)) / 1e6
        agreed = f"{route} gives the tokenizer's own ids on {len(sample)} sample documents ({millions:.1f}M characters)"
        return replace(encoder, route=route, why="; ".join([*refusals, agreed]))
    why = "; ".join(refusals)
    say(f"tokenising with tokenizers, which takes several times longer: {why}")
    return replace(encoder, route="tokenizers", why=why)


def _check_ids(encoder: Encoder, route: str, texts: Sequence[str], expected: Sequence[np.ndarray]) -> float:
    """NotFastError unless the route gives the expected ids; returns the share that it left to the tokenizer."""
    engine = load_checked(encoder.definition, route)
    before = engine.chars_left_over
    for text, ids in zip(texts, expected, strict=True):
        if not np.array_equal(engine.encode(text), ids):
            raise NotFastError(f"its ids differ on the text that begins {text[:40]!r}")
    return (engine.chars_left_over - before) / max(1, sum(map(len, texts)))


def _hard_texts(encoder: Encoder) -> Iterator[str]:
    """Where engines are known to go wrong: ASCII in all surroundings, runs, marks, and spelled-out added tokens."""
    yield from _HARD_TEXTS
    yield from (in_contexts(chr(code)) for code in range(128))
    for token in json.loads(encoder.definition)["added_tokens"]:
        name = token["content"]
        yield f"{name} a{name}b {name}{name} {name[:-1]} {name}\u0338 \n{name}\n1{name}2  {name}  é{name}"
