"""Untie the Knots: split documents into chunks, scatter them over the row, train to restore the order.

A document is split, with `probability`, into 2 to 8 chunks (`hops`), at random points or into equal parts. With `per:
row`, the draw is per row: in some rows all documents are split, in the others none. A chunk of a split document is

    <D> label </D>  <head knot>  text  <tail knot>

without head knot if it is the first chunk and without tail knot if it is the last. Knots are named by the cut (t1 … h1,
t2 … h2) and shared by all documents. The solution follows the chunk that is last in the row, after its EOS if it has
one: <S> label <s> label … </S>, with labels in original order. Chunks are shuffled over the row and, with
`preserve_order`, sorted within each document.

The last document is cut at the end of the row. It may be split, but gets neither labels nor solution, and its last
chunk stays at the end of the row. A document that would fit only without special tokens is not split. Without
`backtrace`, no document gets labels.

The loss mask, over target tokens, excludes the special tokens before a chunk's text, the first token of the text, tail
knots and <S>. Labels in the solution, <s> and </S> are trained on. For documents with EOS this equals the rules of the
paper; it also covers documents without EOS (cut by `longest`).

The same seed gives the same bytes. There are two differences from the public code. The solution of the last document is
right; theirs mixes indices within the document and within the row. And no solution is cut off at the end of the row.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from transformers import PreTrainedTokenizerFast

from unspool.data.packing.pack import WINDOW_DOCS, Doc, RowStream, Tally
from unspool.data.packing.row import Row
from unspool.data.strategies.utk import UtK
from unspool.data.strategies.utk.layout import Choices, Chooser, Pieces, Units, fill_rows, scatter
from unspool.data.strategies.utk.special_tokens import DrawLabels, LabelPool, knot_ids, label_drawer
from unspool.data.strategies.utk.write import Written, gather_labels, write
from unspool.data.tokenize.encoder import build_encoder

# Minimum number of different labels before one repeats: for documents, and for rests of cut documents (one per row).
_LABELS, _REST_LABELS = 8192, 1024


def untangle(
    tokens: np.ndarray, doc_lens: np.ndarray, chunk_ids: np.ndarray | None, knots: Mapping[str, int]
) -> list[np.ndarray]:
    """Reassemble the documents of a row, without marks, as far as the row holds them."""
    opening, closing, solution, _, _, *cuts = knots.values()
    heads, tails = cuts[0::2], cuts[1::2]
    starts = np.cumsum(doc_lens) - doc_lens
    # Text ends at the first tail knot or <S> of its piece, if it has one.
    stops = starts + doc_lens
    closers = np.flatnonzero(np.isin(tokens, [solution, *tails]))
    nearest = np.searchsorted(closers, starts)
    stops = np.minimum(stops, np.append(closers, len(tokens))[nearest])
    owners = np.arange(len(doc_lens)) if chunk_ids is None else chunk_ids
    texts: dict[int, dict[int, np.ndarray]] = {}
    for owner, start, stop in zip(owners.tolist(), starts.tolist(), stops.tolist(), strict=True):
        text, part = tokens[start:stop], 0
        if text[0] == opening:
            text = text[int(np.argmax(text == closing)) + 1 :]
        if int(text[0]) in heads:
            text, part = text[1:], heads.index(int(text[0])) + 1
        texts.setdefault(owner, {})[part] = text
    return [np.concatenate([parts[part] for part in sorted(parts)]) for _, parts in sorted(texts.items())]


@dataclass
class Tangler:
    """Pack a stream of documents into tangled rows; `pack` is a `Packer` (pack.py)."""

    config: UtK
    knots: dict[str, int]  # in the order of their names in knots.py
    draw_labels: DrawLabels
    rng: np.random.Generator
    keep_rest: bool  # the rest of a cut document begins the next row
    # Number of tokens so far in which `mask: paper` and `mask: released` differ.
    counts: dict[str, int] = field(default_factory=lambda: {"masks_differ": 0})

    def pack(self, docs: Iterable[Doc], row_len: int, tally: Tally) -> RowStream:
        drawing = (doc for doc in docs if len(doc.tokens))
        doc_rng, row_rng, *label_rngs, place_rng = self.rng.spawn(5)
        # A row may not need more labels than there are before one repeats; otherwise two of its pieces could share a
        # label.
        most = self.config.most_hops
        half = max(_LABELS, most * (1 + row_len // max(self.config.min_split, most)))
        pools = (
            LabelPool(self.draw_labels, half, label_rngs[0]),
            LabelPool(self.draw_labels, _REST_LABELS, label_rngs[1]),
        )
        choosers = (Chooser(self.config, pools[0], doc_rng), Chooser(self.config, pools[1], row_rng))
        window = _Window([], np.zeros(0, dtype=np.int64), 0, choosers[0].choose(0), choosers[1].choose(0))
        is_done = False
        while not is_done:
            more, ended = _draw(drawing, max(tally.window, row_len))
            window = window.extended(more, choosers, row_len)
            units = fill_rows(
                self.config,
                row_len,
                window.lens,
                window.choices,
                window.row_choices,
                begin=window.begin,
                keep_rest=self.keep_rest,
            )
            points = np.concatenate([window.choices.points, window.row_choices.points])[units.entries]
            pieces = scatter(units, points, self.config, place_rng)
            labels = gather_labels(units, window.choices, window.row_choices, pools, backtrace=self.config.backtrace)
            texts = [doc.tokens for doc in window.docs]
            masks = [doc.loss_mask for doc in window.docs if doc.loss_mask is not None]
            written = write(pieces, units, texts, labels, list(self.knots.values()), masks, mask=self.config.mask)
            made = 0
            try:
                for row in _rows(window, units, pieces, written, row_len):
                    made += 1
                    yield row
            except GeneratorExit:
                self._account(tally, window, units, written, row_len, made)
                for doc, start in window.left(units, made):
                    tally.drop("limit" if start else "unread", doc.source, len(doc.tokens) - start)
                    tally.given_back += not start
                raise
            self._account(tally, window, units, written, row_len, made)
            is_done = ended and made < len(window.row_choices)
            window = window.rest(units)
            tally.settle((doc, len(doc.tokens) - start) for doc, start in window.left(units, 0))
        for doc, start in window.left(units, 0):
            tally.drop("last_row", doc.source, len(doc.tokens) - start)

    def _account(
        self, tally: Tally, window: "_Window", units: Units, written: Written, row_len: int, num_rows: int
    ) -> None:
        """Count the tokens that the first rows hold and drop."""
        tally.added += num_rows * row_len - int(units.lens[units.rows < num_rows].sum())
        self.counts["masks_differ"] += int(np.count_nonzero(written.differing < num_rows * row_len))
        for row in np.flatnonzero(units.dropped[:num_rows]).tolist():
            # If a document was cut and its rest dropped, the next row begins with the next document.
            tally.drop("cut", window.docs[int(units.next_docs[row]) - 1].source, int(units.dropped[row]))


def build_tangler(
    config: UtK, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator, *, keep_rest: bool
) -> Tangler:
    """Build the packer; add missing special tokens to `tokenizer`."""
    knots = knot_ids(tokenizer, config.most_hops)
    draw_labels = label_drawer(build_encoder(tokenizer))
    return Tangler(config, knots, draw_labels, rng, keep_rest=keep_rest)


@dataclass(frozen=True, slots=True)
class _Window:
    """Documents that are planned together; earlier rows may already hold a part of the first one."""

    docs: list[Doc]
    lens: np.ndarray  # int64, of the documents
    begin: int  # offset in the first document
    choices: Choices  # for the documents
    row_choices: Choices  # for the rest of a document at the beginning of a row

    def extended(self, docs: list[Doc], choosers: tuple[Chooser, Chooser], row_len: int) -> "_Window":
        of_docs, of_rows = choosers
        more_lens = np.fromiter((len(doc.tokens) for doc in docs), dtype=np.int64, count=len(docs))
        lens = np.concatenate([self.lens, more_lens])
        choices = self.choices.extended(of_docs.choose(len(docs), more_lens))
        # An estimate: the marks of rests are not known yet.
        num_rows = int(lens.sum() + choices.marks.sum()) // row_len + 2
        row_choices = self.row_choices.extended(of_rows.choose(max(0, num_rows - len(self.row_choices))))
        return _Window(self.docs + docs, lens, self.begin, choices, row_choices)

    def left(self, units: Units, num_rows: int) -> Iterator[tuple[Doc, int]]:
        """Yield the documents that the first rows do not use completely, and how much of each they use."""
        first, start = (
            (int(units.next_docs[num_rows - 1]), int(units.next_starts[num_rows - 1])) if num_rows else (0, self.begin)
        )
        for doc in islice(self.docs, first, None):
            yield doc, start
            start = 0

    def rest(self, units: Units) -> "_Window":
        """Return the window without the tokens of all rows."""
        if not units.num_rows:
            return self
        first, start = int(units.next_docs[-1]), int(units.next_starts[-1])
        return _Window(
            self.docs[first:], self.lens[first:], start, self.choices[first:], self.row_choices[units.num_rows :]
        )


def _draw(docs: Iterator[Doc], most_tokens: int) -> tuple[list[Doc], bool]:
    """Draw the next documents; also return whether there are no more."""
    drawn: list[Doc] = []
    tokens = 0
    for doc in docs:
        drawn.append(doc)
        tokens += len(doc.tokens)
        if tokens >= most_tokens or len(drawn) >= WINDOW_DOCS:
            return drawn, False
    return drawn, True


def _rows(window: _Window, units: Units, pieces: Pieces, written: Written, row_len: int) -> Iterator[Row]:
    sources = [doc.source for doc in window.docs]
    numbers = units.docs.tolist()
    unit_ends = np.cumsum(np.bincount(units.rows, minlength=units.num_rows)).tolist()
    piece_ends = np.cumsum(np.bincount(units.rows[pieces.units], minlength=units.num_rows)).tolist()
    first_unit = first_piece = 0
    for number, (unit_end, piece_end) in enumerate(zip(unit_ends, piece_ends, strict=True)):
        span, held = slice(number * row_len, (number + 1) * row_len), slice(first_piece, piece_end)
        in_row = [sources[doc] for doc in numbers[first_unit:unit_end]]
        yield Row(
            tokens=written.tokens[span],
            doc_lens=written.piece_lens[held],
            loss_mask=written.loss_mask[span],
            source="+".join(dict.fromkeys(in_row)),
            attention="full",
            chunk_ids=(pieces.units[held] - first_unit).astype(np.int32),
            sources=[in_row[unit - first_unit] for unit in pieces.units[held].tolist()],
            added=written.added[span],
        )
        first_unit, first_piece = unit_end, piece_end
