"""Which document comes next: shuffled by the seed, sources by their shares of tokens, long documents more often.

In: corpora, a `RowsConfig`. Out: an iterable of `Doc`s that knows what was drawn from each source.
Promise: the tokens drawn follow the shares. Without `limit`, every document is drawn as often as planned, or until a
source of a mix has no more; what is planned does not depend on how rows are filled.
Price: memory holds a few numbers for every use of a document, never its tokens.
Elsewhere: how often a document is used (upsample.py), filling rows (strategy.py).
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from unspool.base.rng import rng_for
from unspool.data.config import RowsConfig
from unspool.data.pack import Doc, interleave, iter_chunks
from unspool.data.store import CorpusReader
from unspool.data.upsample import draw_uses, is_again, spread

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
        config: RowsConfig,
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
        self._slices = arrays or config.longest is not None
        self._most_tokens = most_tokens
        self._above = config.upsample.above if config.upsample else 0
        spans = [_spans(reader.lens, config.longest) for reader in self._readers]
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
        unit = config.length if config.pack == "whole" else 1
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
        stored: Any = self._readers[source].stored(doc)
        return Doc(stored[start:stop] if self._slices else stored, self._names[source], doc)


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
