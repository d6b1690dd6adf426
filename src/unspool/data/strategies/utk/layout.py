"""Plan tangled rows from document lengths alone: the place of each chunk.

Rows have exactly `row_len` tokens, including special tokens. The content of a row depends on the seed and on the
documents up to its last one, not on how many documents were planned together.
"""

from bisect import bisect_right
from dataclasses import dataclass, fields

import numpy as np

from unspool.data.strategies.split_points import SPLIT_POINTS
from unspool.data.strategies.utk import UtK
from unspool.data.strategies.utk.special_tokens import LabelPool


@dataclass(frozen=True, slots=True)
class Choices:
    """Random choices for documents, or for the rests of cut documents, one entry each."""

    hops: np.ndarray  # int64[n], number of pieces; 1: stays whole
    marks: np.ndarray  # int64[n], tokens that the split adds
    points: np.ndarray  # float64[n, most hops - 1], split points, as draws below 1
    labels: np.ndarray  # int64[n, most hops], numbers in the label pool, one per piece
    draws: np.ndarray  # float64[n], split if below `probability`

    def __len__(self) -> int:
        return len(self.hops)

    def __getitem__(self, which: slice) -> "Choices":
        return Choices(*(getattr(self, field.name)[which] for field in fields(self)))

    def extended(self, more: "Choices") -> "Choices":
        return Choices(
            *(np.concatenate([getattr(self, field.name), getattr(more, field.name)]) for field in fields(self))
        )


class Chooser:
    """Draw `Choices`, with the same number of draws per entry, so that entries do not depend on earlier ones."""

    def __init__(self, config: UtK, pool: LabelPool, rng: np.random.Generator) -> None:
        self._config, self._pool, self._rng = config, pool, rng
        self._most = config.most_hops
        self._counts = np.array(list(config.hops))
        self._shares = np.cumsum(list(config.hops.values())) / sum(config.hops.values())

    def choose(self, count: int, lens: np.ndarray | None = None) -> Choices:
        """Draw choices; with `lens`, do not split documents that are too short."""
        config = self._config
        draws, kind, *points = self._rng.random((count, 1 + self._most)).T
        if config.chunk is None:
            hops = self._counts[np.minimum(np.searchsorted(self._shares, kind, side="right"), len(self._counts) - 1)]
        elif lens is not None:
            hops = np.minimum(-(-lens // config.chunk), self._most)
        else:
            hops = np.ones(count, dtype=np.int64)  # the rest of a cut document, of unknown length
        if config.per == "document":
            hops = np.where(draws < config.probability, hops, 1)
        if lens is not None:
            hops = np.where(lens < np.maximum(config.min_split, hops), 1, hops)
        marks = 2 * (hops - 1)
        labels = np.zeros((count, self._most), dtype=np.int64)
        if config.backtrace:
            is_label = (np.arange(self._most) < hops[:, None]) & (hops > 1)[:, None]
            labels[is_label] = self._pool.take(int(is_label.sum()))
            sizes = np.where(is_label, self._pool.lens(labels) if len(self._pool) else 0, 0)
            # <D> and </D> of each piece; <S>, <s> … and </S>; each label twice.
            marks += np.where(hops > 1, 2 * hops + hops + 1 + 2 * sizes.sum(axis=1), 0)
        return Choices(hops, marks, np.stack(points, axis=1), labels, draws)


@dataclass(frozen=True, slots=True)
class Units:
    """Stretches of documents in rows, row by row, in the order of the documents; int64 except `is_cut`."""

    rows: np.ndarray
    docs: np.ndarray
    starts: np.ndarray  # offset in the document
    lens: np.ndarray
    hops: np.ndarray
    entries: np.ndarray  # index in the choices of the documents, followed by those of the rows
    is_cut: np.ndarray  # bool: the row ends before the document
    next_docs: np.ndarray  # per row: the document in which the next row begins
    next_starts: np.ndarray  # the offset in that document
    dropped: np.ndarray  # per row: tokens of its cut document that are in no row

    @property
    def num_rows(self) -> int:
        return len(self.next_docs)


def fill_rows(
    config: UtK, row_len: int, lens: np.ndarray, docs: Choices, rows: Choices, *, begin: int, keep_rest: bool
) -> Units:
    """Plan all rows that documents of these lengths fill; `begin` tokens of the first are in earlier rows.

    `rows` are the choices for the rests at the beginning of rows, and for rows. `keep_rest`: the rest of a cut document
    begins the next row; otherwise it is dropped.
    """
    splits = np.ones(len(rows), dtype=bool) if config.per == "document" else rows.draws < config.probability
    filling = _Filling(config, row_len, lens, docs, rows)
    doc, start = 0, begin
    for number, is_split in enumerate(splits.tolist()):
        end = filling.row(doc, start, len(lens) + number, is_split)
        if end is None:
            break
        doc, start = end
        dropped = 0
        if start and not keep_rest:
            dropped = int(lens[doc]) - start
            doc, start = doc + 1, 0
        filling.next_rows.append((doc, start, dropped))
    return filling.units(splits)


class _Filling:
    """Rows that are being filled: their documents, and the cuts at their beginnings and ends."""

    def __init__(self, config: UtK, row_len: int, lens: np.ndarray, docs: Choices, rows: Choices) -> None:
        self._row_len, self._min_split = row_len, config.min_split
        self._docs, self._doc_lens = docs, lens
        # As lists, because they are read one by one.
        self._lens: list[int] = lens.tolist()
        self._hops: list[int] = np.concatenate([docs.hops, rows.hops]).tolist()
        self._marks: list[int] = np.concatenate([docs.marks, rows.marks]).tolist()
        # The ends of documents if they followed one another without cuts, in rows without splits and with splits.
        self._ends = [[0, *np.cumsum(cost).tolist()] for cost in (lens, lens + docs.marks)]
        self._taken: list[int] = []  # documents
        self._special: list[tuple[int, ...]] = []  # index in `_taken`, start, length, hops, entry in choices, is_cut
        self._row_ends = [0]  # indices in `_taken`
        self.next_rows: list[tuple[int, int, int]] = []  # where they begin, and the tokens dropped before

    def row(self, doc: int, start: int, entry: int, is_split: bool) -> tuple[int, int] | None:
        """Fill a row from an offset in a document; return where it ends, or None if there are too few documents."""
        taken: list[int] = []
        special: list[tuple[int, ...]] = []
        room, ends = self._row_len, self._ends[is_split]
        while room:
            if not start:
                first, doc = doc, bisect_right(ends, ends[doc] + room) - 1
                taken += range(first, doc)
                room -= ends[doc] - ends[first]
                if not room:
                    break
            if doc == len(self._lens):
                return None
            chosen = entry if start else doc
            size, hops, cost = self._squeeze(self._lens[doc] - start, chosen, room, is_split)
            is_cut = start + size < self._lens[doc]
            special.append((len(self._taken) + len(taken), start, size, hops, chosen, is_cut))
            taken.append(doc)
            room -= cost
            doc, start = (doc, start + size) if is_cut else (doc + 1, 0)
        self._taken += taken
        self._special += special
        self._row_ends.append(len(self._taken))
        return doc, start

    def _squeeze(self, size: int, entry: int, room: int, is_split: bool) -> tuple[int, int, int]:
        """Fit a document into a row's last `room` tokens: return its tokens, its pieces, and the space it takes."""
        hops = self._hops[entry] if is_split else 1
        if size < max(self._min_split, hops):
            hops = 1
        marks = self._marks[entry] if hops > 1 else 0
        if size + marks <= room:
            return size, hops, size + marks
        if size <= room:
            return size, 1, size
        # Cut: the knots take space from the text, and there are neither labels nor a solution.
        size = room - 2 * (hops - 1)
        if size < max(self._min_split, hops):
            return room, 1, room
        return size, hops, room

    def units(self, splits: np.ndarray) -> Units:
        docs = np.array(self._taken, dtype=np.int64)
        rows = np.repeat(np.arange(len(self.next_rows)), np.diff(self._row_ends))
        starts, is_cut = np.zeros_like(docs), np.zeros(len(docs), dtype=bool)
        lens, entries = self._doc_lens[docs], docs.copy()
        hops = np.where(splits[rows], self._docs.hops[docs], 1)
        if self._special:
            where, *found = np.array(self._special, dtype=np.int64).T
            for array, values in zip((starts, lens, hops, entries, is_cut), found, strict=True):
                array[where] = values
        ends = np.array(self.next_rows, dtype=np.int64).reshape(-1, 3).T
        return Units(rows, docs, starts, lens, hops, entries, is_cut, *ends)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces in row order; all arrays int64 except `is_last`."""

    units: np.ndarray
    parts: np.ndarray  # index of the piece in its unit
    starts: np.ndarray  # offset in the document
    lens: np.ndarray
    is_last: np.ndarray  # bool: no piece of its unit comes later in the row

    def __len__(self) -> int:
        return len(self.units)


def scatter(units: Units, points: np.ndarray, config: UtK, rng: np.random.Generator) -> Pieces:
    """Split the units at `points` (float64[units, most hops - 1]) and shuffle the pieces over their rows."""
    owner = np.repeat(np.arange(len(units.hops)), units.hops)
    firsts = np.cumsum(units.hops) - units.hops
    parts = np.arange(len(owner)) - firsts[owner]
    splits = SPLIT_POINTS["equal" if config.chunk else config.split]
    bounds = np.concatenate(
        [np.zeros((len(points), 1), dtype=np.int64), splits(points, units.lens, units.hops), units.lens[:, None]],
        axis=1,
    )
    starts, stops = bounds[owner, parts], bounds[owner, parts + 1]

    places = rng.random(len(owner))
    # A piece that the row's end cuts off stays last in the row.
    places[(firsts + units.hops - 1)[units.is_cut]] = 1.5
    if config.preserve_order:
        places = places[np.argsort(2 * owner + places, kind="stable")]
    order = np.argsort(2 * units.rows[owner] + places, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    latest = np.maximum.reduceat(rank, firsts) if len(firsts) else firsts
    is_last = rank == latest[owner]
    return Pieces(
        owner[order], parts[order], (units.starts[owner] + starts)[order], (stops - starts)[order], is_last[order]
    )
