"""The long documents that conversations are made about.

In: built corpora. Out: texts, and which document is next.
Promise: the order follows from the seed; every document comes up once before any comes up again.
"""

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
class Turn:
    """A document that comes up for the so-manieth time."""

    document: int
    time: int


class Documents:
    def __init__(self, config: SynthConfig, corpora: Mapping[str, Path], tokenizer: Any, *, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer.backend_tokenizer, seed
        self._readers: list[tuple[str, CorpusReader]] = [(name, open_corpus(path)) for name, path in corpora.items()]
        lens = np.concatenate([reader.lens for _, reader in self._readers])
        long = np.flatnonzero(lens >= config.min_tokens)
        self.num_short = len(lens) - len(long)
        if not len(long):
            raise DataError(
                f"none of the {len(lens)} documents of {', '.join(corpora)} has {format_size(config.min_tokens)} "
                f"tokens (the longest has {int(lens.max(initial=0)):,}); lower min_tokens, or name longer documents."
            )
        order = rng_for(seed, "synth documents").permutation(long)
        self._chosen = order[: config.documents] if config.documents else order
        self.lens = lens[self._chosen]
        self._starts = np.cumsum([0, *(len(reader) for _, reader in self._readers)])
        # A part is asked about once, and a stretch summarised once.
        self.stretches = np.maximum(1, self.lens // config.length)
        self._turns = {
            "pairs": self._order("pairs", np.maximum(1, self.lens // config.chunk), config.per_document),
            "summaries": self._order("summaries", self.stretches, config.per_document),
        }

    def __len__(self) -> int:
        return len(self._chosen)

    def num_turns(self, purpose: Purpose) -> int:
        return len(self._turns[purpose])

    def turn(self, purpose: Purpose, number: int) -> Turn:
        """Which document is the `number`th to come up."""
        document, time = self._turns[purpose][number].tolist()
        return Turn(document, time)

    def name(self, document: int) -> tuple[str, str]:
        """The document's source and its id there."""
        source, reader, inner = self._find(document)
        return source, reader.id(inner)

    def text(self, document: int) -> str:
        _, reader, inner = self._find(document)
        return str(self._tokenizer.decode(reader[inner].tolist(), skip_special_tokens=True))

    def _order(self, purpose: str, most: np.ndarray, times: int) -> np.ndarray:
        """Pairs of document and time: all documents in one order, then those that can come up again in another."""
        rounds = []
        for time in range(times):
            left = np.flatnonzero(most > time)
            if not len(left):
                break
            mixed = rng_for(self._seed, "synth order", purpose, time).permutation(left)
            rounds.append(np.stack([mixed, np.full(len(mixed), time)], axis=1))
        return np.concatenate(rounds)

    def _find(self, document: int) -> tuple[str, CorpusReader, int]:
        index = int(self._chosen[document])
        at = int(np.searchsorted(self._starts, index, side="right")) - 1
        source, reader = self._readers[at]
        return source, reader, index - int(self._starts[at])


# Where documents are cut: into parts of about equal size, and to a stretch around one of them.


Span = tuple[int, int]
# A cut may be moved back by this share of a part's size to reach a better place.
SLACK = 0.3
_BREAKS = (re.compile(r"\n\s*\n"), re.compile(r"[.!?…][\"'”’)]*\s+"), re.compile(r"\s+"))


def tile(text: str, size: int) -> list[Span]:
    """The text in parts of about `size` characters; a short rest is spread over all of them."""
    count = max(1, round(len(text) / size))
    wanted = len(text) / count
    cuts = [0]
    for number in range(1, count):
        cuts.append(max(cuts[-1], cut_before(text, round(number * wanted), slack=int(SLACK * wanted))))
    cuts.append(len(text))
    spans = [_trim(text, start, stop) for start, stop in pairwise(cuts)]
    return [span for span in spans if span[1] > span[0]]


def cut_before(text: str, at: int, *, slack: int) -> int:
    """The best place to cut, at most `slack` characters before `at`."""
    if at >= len(text):
        return len(text)
    low = max(0, at - slack)
    for pattern in _BREAKS:
        ends = [found.end() for found in pattern.finditer(text, low, at)]
        if ends:
            return ends[-1]
    return at


def around(text: str, inner: Span, room: int, rng: np.random.Generator) -> Span:
    """A stretch of at most `room` characters that holds `inner`, which lies anywhere in it, by chance."""
    if len(text) <= room:
        return _trim(text, 0, len(text))
    start, stop = inner
    room = max(room, stop - start)
    first, last = max(0, stop - room), min(start, len(text) - room)
    begin = int(rng.integers(first, last + 1)) if last > first else max(0, min(first, start))
    end = min(len(text), begin + room)
    # To whole words, but never into the inner span.
    if begin > 0:
        space = text.find(" ", begin, start)
        begin = space + 1 if space >= 0 else begin
    end = max(stop, cut_before(text, end, slack=end - stop)) if end < len(text) else end
    return _trim(text, min(begin, start), end)


def _trim(text: str, start: int, stop: int) -> Span:
    """Without the space at both ends."""
    part = text[start:stop]
    left = len(part) - len(part.lstrip())
    return (start + left, max(start + left, start + len(part.rstrip())))
