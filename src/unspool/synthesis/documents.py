"""Long source documents: their order, their text and its split into parts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unspool.core.errors import DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.corpus.store import CorpusReader, open_corpus
from unspool.synthesis.config import SynthConfig

Purpose = Literal["pairs", "summaries"]


@dataclass(frozen=True)
class Visit:
    """A document, and the number of its earlier visits."""

    document: int
    time: int


class Documents:
    """Documents of at least `min_tokens` tokens, in random order.

    All documents are visited once before any is visited again.
    """

    def __init__(self, config: SynthConfig, corpora: Mapping[str, Path], tokenizer: Any, *, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer.backend_tokenizer, seed
        self._readers: list[tuple[str, CorpusReader]] = [(name, open_corpus(path)) for name, path in corpora.items()]
        lens = np.concatenate([reader.lens for _, reader in self._readers])
        long = np.flatnonzero(lens >= config.min_tokens)
        self.num_short = len(lens) - len(long)
        if not len(long):
            raise DataError(
                f"none of the {len(lens)} documents of {', '.join(corpora)} has {format_size(config.min_tokens)} "
                f"tokens (the longest has {int(lens.max(initial=0)):,}); lower min_tokens, or use longer documents."
            )
        order = rng_for(seed, "synth documents").permutation(long)
        self._chosen = order[: config.documents] if config.documents else order
        self.lens = lens[self._chosen]
        self._starts = np.cumsum([0, *(len(reader) for _, reader in self._readers)])
        # Every visit uses another part, or summarizes another span.
        self.num_stretches = np.maximum(1, self.lens // config.length)
        self._visits = {
            "pairs": self._order("pairs", np.maximum(1, self.lens // config.chunk), config.per_document),
            "summaries": self._order("summaries", self.num_stretches, config.per_document),
        }

    def __len__(self) -> int:
        return len(self._chosen)

    def num_visits(self, purpose: Purpose) -> int:
        return len(self._visits[purpose])

    def visit(self, purpose: Purpose, number: int) -> Visit:
        document, time = self._visits[purpose][number].tolist()
        return Visit(document, time)

    def name(self, document: int) -> tuple[str, str]:
        """Source of a document, and its id in that source."""
        source, reader, inner = self._find(document)
        return source, reader.id(inner)

    def text(self, document: int) -> str:
        _, reader, inner = self._find(document)
        return str(self._tokenizer.decode(reader[inner].tolist(), skip_special_tokens=True))

    def _order(self, purpose: str, max_visits: np.ndarray, times: int) -> np.ndarray:
        """Pairs (document, visit): all documents in one order, then those with further visits in another order."""
        rounds = []
        for time in range(times):
            left = np.flatnonzero(max_visits > time)
            if not len(left):
                break
            order = rng_for(self._seed, "synth order", purpose, time).permutation(left)
            rounds.append(np.stack([order, np.full(len(order), time)], axis=1))
        return np.concatenate(rounds)

    def _find(self, document: int) -> tuple[str, CorpusReader, int]:
        index = int(self._chosen[document])
        at = int(np.searchsorted(self._starts, index, side="right")) - 1
        source, reader = self._readers[at]
        return source, reader, index - int(self._starts[at])


Span = tuple[int, int]  # start and end, in characters
# A cut may move back by this share of the part size, to the end of a paragraph, sentence or word.
SLACK = 0.3
_BREAKS = (re.compile(r"\n\s*\n"), re.compile(r"[.!?…][\"'”’)]*\s+"), re.compile(r"\s+"))


def split_text(text: str, size: int) -> list[Span]:
    """Split a text into parts of about equal size, near `size` characters."""
    count = max(1, round(len(text) / size))
    wanted = len(text) / count
    cuts = [0]
    for number in range(1, count):
        cuts.append(max(cuts[-1], cut_before(text, round(number * wanted), slack=int(SLACK * wanted))))
    cuts.append(len(text))
    spans = [_trim(text, start, stop) for start, stop in pairwise(cuts)]
    return [span for span in spans if span[1] > span[0]]


def cut_before(text: str, at: int, *, slack: int) -> int:
    """The best position to cut, at most `slack` characters before `at`."""
    if at >= len(text):
        return len(text)
    low = max(0, at - slack)
    for pattern in _BREAKS:
        ends = [found.end() for found in pattern.finditer(text, low, at)]
        if ends:
            return ends[-1]
    return at


def window_around(text: str, inner: Span, size: int, rng: np.random.Generator) -> Span:
    """A random window of at most `size` characters that contains `inner`."""
    if len(text) <= size:
        return _trim(text, 0, len(text))
    start, stop = inner
    size = max(size, stop - start)
    first, last = max(0, stop - size), min(start, len(text) - size)
    begin = int(rng.integers(first, last + 1)) if last > first else max(0, min(first, start))
    end = min(len(text), begin + size)
    # Move to word boundaries, but not into the inner span.
    if begin > 0:
        space = text.find(" ", begin, start)
        begin = space + 1 if space >= 0 else begin
    end = max(stop, cut_before(text, end, slack=end - stop)) if end < len(text) else end
    return _trim(text, min(begin, start), end)


def _trim(text: str, start: int, stop: int) -> Span:
    """The span without whitespace at its ends."""
    part = text[start:stop]
    left = len(part) - len(part.lstrip())
    return (start + left, max(start + left, start + len(part.rstrip())))
