"""The order in which documents are packed: shuffled by the seed, sources by their shares of tokens.

Without `limit`, every document is drawn as often as planned, or until a source of a mix runs out. The plan does not
depend on how rows are filled. Memory holds a few numbers for every use of a document, never its tokens.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby, repeat
from typing import Any, NamedTuple

import numpy as np

from unspool.core.rng import rng_for
from unspool.data.corpus.store import CorpusReader
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.pack import Doc
from unspool.data.strategies.upsample import draw_uses, is_again, spread

# Source, document, start and stop: a document, or the part of one that counts as one (`longest`).
Span = tuple[int, int, int, int]


class Drawn(NamedTuple):
    """What was drawn from one source, in tokens."""

    read: int  # all of them
    used: int  # those that were not given back
    again: int  # of those used, of documents that had been used before
    long: int  # of those used, of documents that upsampling calls long
    long_in: int  # of such documents in the corpus
    dropped: int  # of documents that upsampling leaves out


class Order:
    """The documents of all sources in packing order. It can be gone through once.

    `arrays` gives documents as arrays, for strategies that cut them further; else their pieces are read one by one.
    `most_tokens` ends it with the document that reaches so many.
    """

    def __init__(
        self,
        config: DatasetConfig,
        readers: Mapping[str, CorpusReader],
        *,
        seed: int,
        name: str,
        arrays: bool = False,
        most_tokens: int | None = None,
    ) -> None:
        rng = rng_for(seed, "rows", name)
        self.readers = readers
        self.ran_out: str | None = None  # the source that ended the stream
        self._sources_read = array("H")  # of the documents drawn, in order
        self._readers = list(readers.values())
        self._names = list(readers)
        self._shares = list(config.shares.values())
        self._slices = arrays or config.max_doc_len is not None
        self._is_masked = any(reader.is_masked for reader in self._readers)
        self._most_tokens = most_tokens
        self._above = config.upsample.above if config.upsample else 0
        spans = [_spans(reader.lens, config.max_doc_len) for reader in self._readers]
        if config.upsample is None:
            self._spans = [rng.permutation(each) for each in spans]
            self._again = [np.zeros(len(each), dtype=np.bool_) for each in spans]
            self._dropped = [0] * len(spans)
        else:
            chances = rng_for(seed, "upsample", name)
            uses = [draw_uses(reader.lens, config.upsample, chances) for reader in self._readers]
            orders = [spread(use[each[:, 0]], rng) for use, each in zip(uses, spans, strict=True)]
            self._spans = [each[order] for each, order in zip(spans, orders, strict=True)]
            self._again = [is_again(order) for order in orders]
            dropped = [reader.lens[use == 0] for reader, use in zip(self._readers, uses, strict=True)]
            self._dropped = [int(lens.sum()) for lens in dropped]
        # Under `whole` a document counts towards its source's share only with the rows it gives.
        unit = config.seq_len if config.packing == "single_doc" else 1
        self._useful = [(each[:, 2] - each[:, 1]) // unit * unit for each in self._spans]

    def __iter__(self) -> Iterator[Doc]:
        return map(self._open, self._draw())

    def stretches(self) -> Iterator[Iterator[Doc]]:
        """The same documents, in stretches that hold none of them twice."""
        return (map(self._open, spans) for _, spans in groupby(self._draw(), _numbered()))

    @property
    def documents_read(self) -> int:
        return len(self._sources_read)

    def drawn(self, given_back: int = 0) -> dict[str, Drawn]:
        """By source. A document counts from when it is asked for; the last `given_back` were not needed."""
        sources = np.array(self._sources_read, dtype=np.int64)
        read = np.bincount(sources, minlength=len(self._names)).tolist()
        used = np.bincount(sources[: len(sources) - given_back], minlength=len(self._names)).tolist()
        return {name: self._drawn(source, read[source], used[source]) for source, name in enumerate(self._names)}

    def _drawn(self, source: int, num_read: int, num_used: int) -> Drawn:
        lens = self._readers[source].lens
        docs, starts, stops = self._spans[source][:num_read].T
        tokens = stops - starts
        used = tokens[:num_used]
        return Drawn(
            read=int(tokens.sum()),
            used=int(used.sum()),
            again=int(used[self._again[source][:num_used]].sum()),
            long=int(used[lens[docs[:num_used]] >= self._above].sum()),
            long_in=int(lens[lens >= self._above].sum()),
            dropped=self._dropped[source],
        )

    def _draw(self) -> Iterator[Span]:
        left = [iter_chunks(each) for each in self._spans]
        taken = [0] * len(left)
        tokens = 0
        for source in interleave(self._useful, self._shares):
            doc, start, stop = next(left[source])
            taken[source] += 1
            tokens += stop - start
            yield source, doc, start, stop
            if self._most_tokens is not None and tokens >= self._most_tokens:
                return
        over = [len(each) - count for each, count in zip(self._spans, taken, strict=True)]
        self.ran_out = self._names[over.index(0)]

    def _open(self, span: Span) -> Doc:
        source, doc, start, stop = span
        self._sources_read.append(source)
        reader = self._readers[source]
        stored: Any = reader.stored(doc)
        mask: Any = None
        if self._is_masked:
            # Beside masked documents every other one has a mask too, which takes no memory.
            mask = reader.stored_mask(doc) if reader.is_masked else np.broadcast_to(np.True_, len(stored))
        if self._slices:
            stored, mask = stored[start:stop], None if mask is None else mask[start:stop]
        return Doc(stored, self._names[source], doc, mask)


def _numbered() -> Callable[[Span], int]:
    """For each span given, in order, the number of its stretch."""
    seen: set[Span] = set()
    number = 0

    def stretch(span: Span) -> int:
        nonlocal number
        if span in seen:
            number += 1
            seen.clear()
        seen.add(span)
        return number

    return stretch


def _spans(lens: np.ndarray, longest: int | None) -> np.ndarray:
    """(document, start, stop) of all documents, those above `longest` in several spans."""
    longest = longest or int(lens.max(initial=1))
    counts = -(-lens // longest)
    docs = np.repeat(np.arange(len(lens)), counts)
    starts = (np.arange(len(docs)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    return np.stack([docs, starts, np.minimum(starts + longest, lens[docs])], axis=1)


def interleave(useful: Sequence[np.ndarray], shares: Sequence[float]) -> Iterator[int]:
    """Which source gives its next document, so that the tokens taken so far follow `shares`.

    `useful[s][i]` counts the tokens that the i-th document of source s brings. Always the source
    that is furthest behind its share goes next. Ends when that source has no document left,
    because going on would break the shares.
    """
    goal = [share / sum(shares) for share in shares]
    if len(goal) == 1:
        yield from repeat(0, len(useful[0]))
        return
    taken = [0] * len(goal)
    left = [iter_chunks(tokens) for tokens in useful]
    total = 0
    while True:
        source, furthest = 0, -math.inf
        for index, share in enumerate(goal):
            behind = share * total - taken[index]
            if behind > furthest:
                source, furthest = index, behind
        tokens = next(left[source], None)
        if tokens is None:
            return
        taken[source] += tokens
        total += tokens
        yield source


def iter_chunks(values: np.ndarray) -> Iterator[Any]:
    """The array's entries as Python's own, a few thousand at a time: one by one is slow, all at once large."""
    return chain.from_iterable(values[start : start + 4096].tolist() for start in range(0, len(values), 4096))
