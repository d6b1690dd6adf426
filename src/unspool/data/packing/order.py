"""The order in which documents are packed: shuffled by the seed, sources by their shares of trained tokens.

Without `limit`, every document is drawn as often as planned, or until a source of a mix runs out. The order within a
source does not depend on how rows are filled, but the order of sources does (shares.py). Memory holds a few numbers per
use of a document, never its tokens.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np

from unspool.core.rng import rng_for
from unspool.data.corpus.store import CorpusReader
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.pack import Doc, Tally
from unspool.data.packing.shares import ShareKeeper, SourceShare
from unspool.data.strategies.base import RowBuilder
from unspool.data.strategies.long_context_gain import uses_by_gain
from unspool.data.strategies.upsample import draw_uses, is_again, spread

# Source, document, start and stop of a document or of a part that counts as one (`longest`), and the number of tokens
# after it that are cut off to keep the shares.
Span = tuple[int, int, int, int, int]


class Drawn(NamedTuple):
    """Tokens drawn from one source."""

    read: int  # all drawn
    used: int  # not given back
    again: int  # of `used`: in documents that were used before
    long: int  # of `used`: in documents that upsampling calls long
    long_in: int  # in long documents of the corpus
    dropped: int  # in documents that upsampling drops
    low_gain: int  # in documents that `score` drops


class Order:
    """The documents of all sources in packing order; iterable once.

    `builder` describes the needs of its rows, and `most_rows` is the limit. With several sources, `tally.shares`
    chooses the source of the next document. `gains` are the scores of the
    documents of scored sources. The tally counts documents that are cut to keep the shares.
    """

    def __init__(
        self,
        config: DatasetConfig,
        readers: Mapping[str, CorpusReader],
        *,
        seed: int,
        name: str,
        builder: RowBuilder,
        tally: Tally,
        most_rows: int | None = None,
        gains: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        rng = rng_for(seed, "rows", name)
        self.readers = readers
        self.ran_out: str | None = None  # the source that ended the stream
        self._sources_read = array("H")  # source of each drawn document, in order
        self._readers = list(readers.values())
        self._names = list(readers)
        self._tally = tally
        self._slices = builder.arrays or config.max_doc_len is not None
        self._is_masked = any(reader.is_masked for reader in self._readers)
        # Best fit plans many documents at a time, but a limit must not make it draw more than it needs.
        self._most_tokens = most_rows * config.seq_len if most_rows and config.packing == "best_fit" else None
        self._above = config.upsample.above if config.upsample else 0
        spans = [_spans(reader.lens, config.max_doc_len) for reader in self._readers]
        self.gains = gains or {}
        self._low_gain = [0] * len(spans)
        self.gain_uses: dict[str, np.ndarray] = {}  # of scored sources: how often each document is used
        if config.score is not None:
            chances = rng_for(seed, "score", name)
            for source, values in self.gains.items():
                self.gain_uses[source] = uses_by_gain(values, readers[source].lens, config.score, chances)
        if config.upsample is None and config.score is None:
            self._spans = [rng.permutation(each) for each in spans]
            self._again = [np.zeros(len(each), dtype=np.bool_) for each in spans]
            self._dropped = [0] * len(spans)
        else:
            uses = [np.ones(len(reader), dtype=np.int64) for reader in self._readers]
            if config.upsample is not None:
                chances = rng_for(seed, "upsample", name)
                uses = [draw_uses(reader.lens, config.upsample, chances) for reader in self._readers]
            by_gain = [self.gain_uses.get(source, np.ones_like(use)) for source, use in zip(readers, uses, strict=True)]
            self._low_gain = [
                int(reader.lens[use == 0].sum()) for reader, use in zip(self._readers, by_gain, strict=True)
            ]
            dropped = [
                reader.lens[(use == 0) & (often > 0)]
                for reader, use, often in zip(self._readers, uses, by_gain, strict=True)
            ]
            uses = [use * often for use, often in zip(uses, by_gain, strict=True)]
            orders = [spread(use[each[:, 0]], rng) for use, each in zip(uses, spans, strict=True)]
            self._spans = [each[order] for each, order in zip(spans, orders, strict=True)]
            self._again = [is_again(order) for order in orders]
            self._dropped = [int(lens.sum()) for lens in dropped]
        if config.max_epochs > 1:
            again = [[rng.permutation(len(each)) for _ in range(config.max_epochs - 1)] for each in self._spans]
            self._spans = [
                np.concatenate([each, *(each[order] for order in more)])
                for each, more in zip(self._spans, again, strict=True)
            ]
            self._again = [
                np.concatenate([first, np.ones(len(spans) - len(first), dtype=np.bool_)])
                for first, spans in zip(self._again, self._spans, strict=True)
            ]
        if len(self._readers) > 1:
            tally.shares = self._share_keeper(config, builder, most_rows)

    def __iter__(self) -> Iterator[Doc]:
        return map(self._open, self._draw())

    def stretches(self) -> Iterator[Iterator[Doc]]:
        """Yield the same documents in groups without repeated documents."""
        return (map(self._open, spans) for _, spans in groupby(self._draw(), _numbered()))

    @property
    def documents_read(self) -> int:
        return len(self._sources_read)

    def drawn(self, given_back: int = 0) -> dict[str, Drawn]:
        """Return counts by source. A document counts when it is drawn; the last `given_back` were not needed."""
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
            low_gain=self._low_gain[source],
        )

    def _share_keeper(self, config: DatasetConfig, builder: RowBuilder, most_rows: int | None) -> ShareKeeper:
        """Build the share keeper from each source's tokens and rate; a rate is exact for whole documents."""
        unit = config.seq_len if config.packing == "single_doc" else 1
        total = sum(config.shares.values())
        sources = []
        for name, reader, spans in zip(self._names, self._readers, self._spans, strict=True):
            lens = spans[:, 2] - spans[:, 1]
            usable = int((lens[lens >= builder.min_doc_len] // unit * unit).sum())
            trained = reader.num_trained / max(1, reader.num_tokens)
            sources.append(SourceShare(name, config.shares[name] / total, trained, left=usable))
        return ShareKeeper(
            sources,
            config.seq_len,
            most_rows=most_rows,
            unit=unit,
            min_doc_len=builder.min_doc_len,
            truncates=config.packing == "truncate",
            borrows=builder.borrows,
        )

    def _draw(self) -> Iterator[Span]:
        shares = self._tally.shares
        if shares is None:
            yield from self._draw_one()
            return
        left = [iter_chunks(each) for each in self._spans]
        while (source := shares.next_source()) is not None:
            found = next(left[source], None)
            if found is None:
                self.ran_out = self._names[source]
                if shares.run_out(source):
                    return
                continue
            doc, start, stop = found
            used = shares.take(source, stop - start)
            yield source, doc, start, start + used, stop - start - used

    def _draw_one(self) -> Iterator[Span]:
        tokens = 0
        for doc, start, stop in iter_chunks(self._spans[0]):
            tokens += stop - start
            yield 0, doc, start, stop, 0
            if self._most_tokens is not None and tokens >= self._most_tokens:
                return
        self.ran_out = self._names[0]

    def _open(self, span: Span) -> Doc:
        source, doc, start, stop, rest = span
        self._sources_read.append(source)
        if rest:
            self._tally.drop("share", self._names[source], rest)
        reader = self._readers[source]
        stored: Any = reader.stored(doc)
        mask: Any = None
        if self._is_masked:
            # If any documents have a mask, the others get one too; it takes no memory.
            mask = reader.stored_mask(doc) if reader.is_masked else np.broadcast_to(np.True_, len(stored))
        if self._slices or stop < len(stored):
            stored, mask = stored[start:stop], None if mask is None else mask[start:stop]
        return Doc(stored, self._names[source], doc, mask)


def _numbered() -> Callable[[Span], int]:
    """Return a function that numbers the stretch of each span, called in order."""
    seen: set[tuple[int, ...]] = set()
    number = 0

    def stretch(span: Span) -> int:
        nonlocal number
        if span[:3] in seen:
            number += 1
            seen.clear()
        seen.add(span[:3])
        return number

    return stretch


def _spans(lens: np.ndarray, longest: int | None) -> np.ndarray:
    """Return (document, start, stop) of all documents; those above `longest` in several spans."""
    longest = longest or int(lens.max(initial=1))
    counts = -(-lens // longest)
    docs = np.repeat(np.arange(len(lens)), counts)
    starts = (np.arange(len(docs)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    return np.stack([docs, starts, np.minimum(starts + longest, lens[docs])], axis=1)


def iter_chunks(values: np.ndarray) -> Iterator[Any]:
    """Yield the entries as Python objects, converted in batches: one by one is slow, all at once needs memory."""
    return chain.from_iterable(values[start : start + 4096].tolist() for start in range(0, len(values), 4096))
