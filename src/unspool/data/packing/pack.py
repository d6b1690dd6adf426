"""Pack tokenized documents into rows of equal length.

Every token is in a row or counted in `Tally.dropped` by reason and source, even if the consumer closes the generator
early. The modes:

`concat` fills rows and continues a cut document in the next row.
`truncate` fills rows and discards the rest of a cut document.
`single_doc` cuts rows only from documents of at least a row's length, so that every row holds one document.
`best_fit` places documents to leave the least space (best-fit decreasing). Only documents longer than a row are cut:
into full rows, and a rest that is placed like a document. The remaining space is padding: a separate document at the
row's end, without loss and counted in `Tally.padding`.

Documents are planned in windows, so memory is bounded; `best_fit` is optimal within a window.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from unspool.data.lengths import Lengths
from unspool.data.packing.modes import PLANNERS, Layout
from unspool.data.packing.row import BATCH_TOKENS, Row
from unspool.data.packing.shares import ShareKeeper

# Tokens that are planned at a time; with more to choose from, `fit` leaves less space empty.
WINDOW_TOKENS = {"best_fit": 1 << 26}
# Maximum number of documents that are planned at a time; each takes about 300 bytes.
WINDOW_DOCS = 1 << 17
# If a limit takes only some rows, `best_fit` chooses the next row from this many rows of each source.
_ROWS_TO_CHOOSE_FROM = 8


@dataclass(frozen=True, slots=True)
class Doc:
    """A tokenized document."""

    tokens: np.ndarray
    source: str
    number: int = -1  # index in its source's corpus; parts of one document share it
    loss_mask: np.ndarray | None = None  # bool; documents that are packed together all have one, or none has


@dataclass(slots=True)
class SourceTally:
    """Counts of one source's documents."""

    documents: int = 0  # documents with at least their first token in a row
    truncated: int = 0  # of those, documents that are not whole in one row
    lengths: Lengths = field(default_factory=Lengths)  # of the pieces in rows
    dropped: Counter[str] = field(default_factory=Counter)  # tokens by reason


@dataclass(slots=True)
class Tally:
    """Where tokens went: tokens in + added = tokens in rows + dropped."""

    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    added: int = 0  # by tangling or as padding
    padding: int = 0  # part of `added`
    given_back: int = 0  # documents drawn ahead but not needed; their tokens are dropped as `unread`
    sources: dict[str, SourceTally] = field(default_factory=dict)
    shares: ShareKeeper | None = None  # of a dataset with several sources

    @property
    def window(self) -> int:
        """Number of tokens to plan at a time."""
        return self.shares.window if self.shares else BATCH_TOKENS

    def settle(self, waiting: Iterable[tuple["Doc", int]]) -> None:
        """Report documents and tokens that wait for a row; all others are in rows or dropped."""
        if self.shares:
            by_source: Counter[str] = Counter()
            for doc, tokens in waiting:
                by_source[doc.source] += tokens
            self.shares.settle(by_source)

    def drop(self, reason: str, source: str, tokens: int) -> None:
        self.dropped[reason] += tokens
        self.source(source).dropped[reason] += tokens

    def source(self, name: str) -> SourceTally:
        return self.sources.setdefault(name, SourceTally())


RowStream = Generator[Row, None, None]
Packer = Callable[[Iterable[Doc], int, Tally], RowStream]


class _Window:
    """Documents that are planned together; earlier rows may already hold a part of the first ones."""

    def __init__(self, docs: list[Doc], begins: list[int]) -> None:
        self.docs = docs
        self.begins = np.array(begins + [0] * (len(docs) - len(begins)), dtype=np.int64)
        self.full_lens = np.fromiter((len(doc.tokens) for doc in docs), dtype=np.int64, count=len(docs))
        self.lens = self.full_lens - self.begins
        numbers: dict[str, int] = {}
        self.source_ids = np.array([numbers.setdefault(doc.source, len(numbers)) for doc in docs], dtype=np.int64)
        self.sources = list(numbers)

    def rest(self, layout: Layout) -> "_Window":
        begins = self.begins[layout.rest.docs] + layout.rest.starts
        return _Window([self.docs[doc] for doc in layout.rest.docs.tolist()], begins.tolist())

    def trains(self, doc: int, start: int, stop: int) -> bool:
        mask = self.docs[doc].loss_mask
        return mask is None or bool(mask[start:stop].any())

    def extended(self, docs: list[Doc]) -> "_Window":
        return _Window(self.docs + docs, self.begins.tolist())


def pack_rows(docs: Iterable[Doc], row_len: int, tally: Tally, *, mode: str, pad: int = 0) -> RowStream:
    """Pack documents into rows. `pad` is the padding token, never a prediction target."""
    drawing = iter(docs)
    most_tokens = max(WINDOW_TOKENS.get(mode, tally.window), row_len)
    window = _Window([], [])
    ended = False
    while not ended:
        needed = tally.shares.most_window if tally.shares else most_tokens
        more, ended = _draw(drawing, min(most_tokens, needed))
        window = window.extended(more)
        layout = _without_untrained(window, PLANNERS[mode](window.lens, row_len, ended))
        if tally.shares and mode == "best_fit":
            layout = _ordered_by_shares(window, layout, tally.shares)
        made = 0
        try:
            for row in _gather(window, layout, row_len, pad):
                made += 1
                yield row
        except GeneratorExit:
            _account(tally, window, _stop(layout, made, window.lens))
            raise
        _account(tally, window, layout)
        window = window.rest(layout)
        tally.settle(zip(window.docs, window.lens.tolist(), strict=True))


PACKERS = {mode: partial(pack_rows, mode=mode) for mode in PLANNERS}


def _draw(docs: Iterator[Doc], most_tokens: float) -> tuple[list[Doc], bool]:
    """Draw the next documents; also return whether there are no more."""
    drawn: list[Doc] = []
    tokens = 0
    for doc in docs:
        if not len(doc.tokens):
            continue
        drawn.append(doc)
        tokens += len(doc.tokens)
        if tokens >= most_tokens or len(drawn) >= WINDOW_DOCS:
            return drawn, False
    return drawn, True


def _gather(window: _Window, layout: Layout, row_len: int, pad: int) -> Iterator[Row]:
    """Yield the planned rows, copied in batches: one by one would take most of the time."""
    padding = np.full(row_len if layout.padded else 0, pad, dtype=np.uint32)
    texts = [*(doc.tokens for doc in window.docs), padding]  # padding has number -1
    is_masked = bool(window.docs) and window.docs[0].loss_mask is not None
    masks = [*(doc.loss_mask for doc in window.docs), np.zeros(len(padding), dtype=np.bool_)]
    starts = layout.pieces.starts + np.append(window.begins, 0)[layout.pieces.docs]
    stops = starts + layout.pieces.lens
    ends = np.cumsum(layout.per_row)
    at_once = max(1, BATCH_TOKENS // row_len)
    for first in range(0, layout.num_rows, at_once):
        last = min(first + at_once, layout.num_rows)
        low, high = int(ends[first] - layout.per_row[first]), int(ends[last - 1])
        docs = layout.pieces.docs[low:high].tolist()
        places = [*zip(docs, starts[low:high].tolist(), stops[low:high].tolist(), strict=True)]
        tokens = np.concatenate([texts[doc][start:stop] for doc, start, stop in places], dtype=np.uint32)
        lens = layout.pieces.lens[low:high].astype(np.int32)
        mask = np.repeat(layout.pieces.docs[low:high] >= 0, lens) if layout.padded else None
        if is_masked:
            mask = np.concatenate([masks[doc][start:stop] for doc, start, stop in places], dtype=np.bool_)
        borders = (ends[first:last] - low).tolist()
        begin = 0
        for number, end in enumerate(borders):
            span = slice(number * row_len, (number + 1) * row_len)
            sources = None
            source = window.sources[0]
            if len(window.sources) > 1:
                sources = [window.docs[doc].source if doc >= 0 else "" for doc in docs[begin:end]]
                source = "+".join(dict.fromkeys(filter(None, sources)))
            row_mask = None if mask is None else mask[span]
            yield Row(tokens[span], lens[begin:end], row_mask, source, "intra_document", sources=sources)
            begin = end


def _without_untrained(window: _Window, layout: Layout) -> Layout:
    """Remove rows without prediction targets from the layout: they cost as much as others and train nothing."""
    if not window.docs or window.docs[0].loss_mask is None or not layout.num_rows:
        return layout
    pieces = layout.pieces
    starts = pieces.starts + np.append(window.begins, 0)[pieces.docs]
    # The first token of a piece is never a prediction target.
    places = zip(pieces.docs.tolist(), (starts + 1).tolist(), (starts + pieces.lens).tolist(), strict=True)
    trains = np.array([doc >= 0 and window.trains(doc, start, stop) for doc, start, stop in places])
    rows = np.repeat(np.arange(layout.num_rows), layout.per_row)
    kept = np.bincount(rows, weights=trains, minlength=layout.num_rows) > 0
    untrained = pieces[~kept[rows]].tokens_by_doc(len(window.docs))
    drops = layout.drops | {"untrained": untrained}
    return Layout(pieces[kept[rows]], layout.per_row[kept], layout.rest, drops, layout.padded)


def _ordered_by_shares(window: _Window, layout: Layout, shares: ShareKeeper) -> Layout:
    """Order the rows so that the first ones also keep the shares, for a limit that takes only those."""
    pieces, is_doc = layout.pieces, layout.pieces.docs >= 0
    rows = np.repeat(np.arange(layout.num_rows), layout.per_row)
    held = np.zeros((layout.num_rows, len(window.sources)))
    np.add.at(held, (rows[is_doc], window.source_ids[pieces.docs[is_doc]]), pieces.lens[is_doc])
    by_name = {source.name: source for source in shares.sources}
    goal = np.array([by_name[name].goal for name in window.sources])
    held *= [by_name[name].rate for name in window.sources]
    # Candidates: for each source, the next rows that hold most of it. The row that keeps the shares best comes next.
    by_main = held.argmax(axis=1)
    queues = [np.flatnonzero(by_main == number).tolist()[::-1] for number in range(len(goal))]
    order: list[int] = []
    taken = np.zeros(len(goal))
    while heads := [row for queue in queues for row in queue[-_ROWS_TO_CHOOSE_FROM:]]:
        after = taken + held[heads]
        error = np.abs(after - after.sum(axis=1, keepdims=True) * goal).max(axis=1)
        best = int(error.argmin())
        taken = after[best]
        order.append(heads[best])
        queue = queues[by_main[heads[best]]]
        del queue[queue.index(heads[best], max(0, len(queue) - _ROWS_TO_CHOOSE_FROM))]
    begins = np.cumsum(layout.per_row) - layout.per_row
    moved = [np.arange(begins[row], begins[row] + layout.per_row[row]) for row in order]
    in_order = np.concatenate(moved) if moved else np.zeros(0, dtype=np.int64)
    return Layout(pieces[in_order], layout.per_row[order], layout.rest, layout.drops, layout.padded)


def _stop(layout: Layout, num_rows: int, lens: np.ndarray) -> Layout:
    """Truncate a layout to its first rows."""
    kept = layout.pieces[: int(layout.per_row[:num_rows].sum())]
    in_rows = kept.tokens_by_doc(len(lens))
    drops = {reason: tokens for reason, tokens in layout.drops.items() if reason != "last_row"}
    dropped = sum(drops.values(), np.zeros_like(lens))
    # Documents after the last document of the last row were drawn ahead, as were, under `fit`, others without a row.
    seen = (np.arange(len(lens)) <= kept.docs.max(initial=-1)) & (in_rows + dropped > 0)
    drops = {reason: np.where(seen, tokens, 0) for reason, tokens in drops.items()}
    drops["limit"] = np.where(seen, lens - in_rows - dropped, 0)
    drops["unread"] = np.where(seen, 0, lens)
    return Layout(kept, layout.per_row[:num_rows], layout.rest[:0], drops, layout.padded)


def _account(tally: Tally, window: _Window, layout: Layout) -> None:
    is_doc = layout.pieces.docs >= 0
    pieces = layout.pieces[is_doc]
    padding = int(layout.pieces.lens[~is_doc].sum())
    tally.padding += padding
    tally.added += padding
    opens = (window.begins[pieces.docs] + pieces.starts) == 0
    cut = opens & (pieces.lens < window.full_lens[pieces.docs])
    piece_sources = window.source_ids[pieces.docs]
    for number, name in enumerate(window.sources):
        mine = piece_sources == number
        entry = tally.source(name)
        entry.documents += int(opens[mine].sum())
        entry.truncated += int(cut[mine].sum())
        entry.lengths.add(pieces.lens[mine])
        for reason, tokens in layout.drops.items():
            tally.drop(reason, name, int(tokens[window.source_ids == number].sum()))
    if "unread" in layout.drops:
        tally.given_back += int(((layout.drops["unread"] > 0) & (window.begins == 0)).sum())
