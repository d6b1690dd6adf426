"""Packing modes: assign parts of documents to rows, from lengths alone.

For every document, length = tokens in rows + drops + rest. All rows have exactly `row_len` tokens, and nothing is
random. Only `best_fit` loops in Python, once for all documents of one length that enter one row.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PADDING = -1


@dataclass(frozen=True, slots=True)
class Pieces:
    """Contiguous parts of documents, all arrays int64."""

    docs: np.ndarray  # index of the document; PADDING for none
    starts: np.ndarray  # offset in the document
    lens: np.ndarray

    def __getitem__(self, which: slice | np.ndarray) -> "Pieces":
        return Pieces(self.docs[which], self.starts[which], self.lens[which])

    def tokens_by_doc(self, num_docs: int) -> np.ndarray:
        is_doc = self.docs >= 0
        return _sums(self.docs[is_doc], self.lens[is_doc], num_docs)


@dataclass(frozen=True, slots=True)
class Layout:
    pieces: Pieces  # row by row
    per_row: np.ndarray  # number of pieces in each row
    rest: Pieces  # to put in front of the next documents
    drops: dict[str, np.ndarray]  # reason: tokens of each document
    padded: bool = False  # whether rows of this mode may hold padding

    @property
    def num_rows(self) -> int:
        return len(self.per_row)


def lay_concat(lens: np.ndarray, row_len: int, is_last: bool) -> Layout:
    ends = np.cumsum(lens)
    total = int(lens.sum())
    borders = np.union1d(ends, np.arange(row_len, total + 1, row_len))
    begins = np.concatenate([np.zeros(1, dtype=np.int64), borders])[: len(borders)]
    docs = np.searchsorted(ends, begins, side="right")
    pieces = Pieces(docs, begins - (ends - lens)[docs], borders - begins)
    num_rows = total // row_len
    in_rows = begins < num_rows * row_len
    per_row = np.bincount(begins[in_rows] // row_len, minlength=num_rows)
    return _finish(pieces[in_rows], per_row, pieces[~in_rows], {}, is_last, len(lens))


def lay_truncate(lens: np.ndarray, row_len: int, is_last: bool) -> Layout:
    ends = np.cumsum(lens)
    begins = ends - lens
    # For each document: the document that fills a row which begins with it.
    fills = np.searchsorted(ends, begins + row_len).tolist()
    fillers: list[int] = []
    first = 0
    while first < len(lens) and fills[first] < len(lens):
        fillers.append(fills[first])
        first = fills[first] + 1
    lasts = np.array(fillers, dtype=np.int64)
    firsts = np.concatenate([np.zeros(1, dtype=np.int64), lasts + 1])[: len(lasts)]
    cut = np.zeros_like(lens)
    cut[lasts] = ends[lasts] - begins[firsts] - row_len
    pieces = Pieces(np.arange(len(lens)), np.zeros_like(lens), lens - cut)
    return _finish(pieces[:first], lasts - firsts + 1, pieces[first:], {"cut": cut}, is_last, len(lens))


def lay_single_doc(lens: np.ndarray, row_len: int, is_last: bool) -> Layout:
    pieces, tails = _full_rows(lens, row_len)
    drops = {"short": np.where(lens < row_len, lens, 0), "tail": np.where(lens < row_len, 0, tails)}
    return _finish(pieces, np.ones_like(pieces.docs), pieces[:0], drops, is_last, len(lens))


def lay_best_fit(lens: np.ndarray, row_len: int, is_last: bool) -> Layout:
    full, tails = _full_rows(lens, row_len)
    docs = np.flatnonzero(tails)
    placed = Pieces(docs, (lens - tails)[docs], tails[docs])
    rows, num_rows = best_fit(placed.lens, row_len)
    room = row_len - _sums(rows, placed.lens, num_rows)
    rest = placed[:0]
    if num_rows and not is_last:
        # The emptiest row is planned again with the next documents; returning more rows could go on forever.
        back = int(np.argmax(room))
        rest = placed[rows == back]
        placed, rows = placed[rows != back], rows[rows != back]
        rows -= rows > back
        room = np.delete(room, back)

    padded = np.flatnonzero(room)
    padding = Pieces(np.full(len(padded), PADDING), np.zeros(len(padded), dtype=np.int64), room[padded])
    pieces = Pieces(
        *(np.concatenate(parts) for parts in zip(_arrays(full), _arrays(placed), _arrays(padding), strict=True))
    )
    places = _spread(len(full.docs) + len(room))
    row_of = places[np.concatenate([np.arange(len(full.docs)), len(full.docs) + rows, len(full.docs) + padded])]
    # Documents keep their order within a row, and padding comes last.
    order = np.lexsort((np.where(pieces.docs < 0, len(lens), pieces.docs), row_of))
    return Layout(pieces[order], np.bincount(row_of, minlength=len(places)), rest, {}, padded=True)


Planner = Callable[[np.ndarray, int, bool], Layout]
PLANNERS: dict[str, Planner] = {
    "concat": lay_concat,
    "best_fit": lay_best_fit,
    "truncate": lay_truncate,
    "single_doc": lay_single_doc,
}


def best_fit(lens: np.ndarray, row_len: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: return the row of each length, and the number of rows.

    The longest goes first, always into the fullest row with enough space. A row that took one and has space for another
    of that length is then the fullest, so equal lengths are placed together.
    """
    order = np.argsort(-lens, kind="stable")
    values, counts = np.unique(lens, return_counts=True)
    rooms: list[int] = []  # distinct free spaces of open rows, sorted
    open_rows: dict[int, list[int]] = {}  # by free space
    rows: list[int] = []
    takes: list[int] = []
    num_rows = 0
    for length, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            place = bisect_left(rooms, length)
            if place == len(rooms):
                room, row = row_len, num_rows
                num_rows += 1
            else:
                room = rooms[place]
                row = open_rows[room].pop()
                if not open_rows[room]:
                    del rooms[place], open_rows[room]
            take = min(left, room // length)
            rows.append(row)
            takes.append(take)
            left -= take
            room -= take * length
            if room in open_rows:
                open_rows[room].append(row)
            elif room:
                open_rows[room] = [row]
                insort(rooms, room)
    row_of = np.empty(len(lens), dtype=np.int64)
    row_of[order] = np.repeat(np.array(rows, dtype=np.int64), takes)
    return row_of, num_rows


def _spread(count: int) -> np.ndarray:
    """Return a position for each row that mixes lengths, because best-fit opens rows by length.

    Steps of the golden section divide a circle most evenly, after any number of steps.
    """
    angles = (np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
    return np.argsort(np.argsort(angles, kind="stable"))


def _full_rows(lens: np.ndarray, row_len: int) -> tuple[Pieces, np.ndarray]:
    """Return the rows that single documents fill, and the rest of each document."""
    counts = lens // row_len
    docs = np.repeat(np.arange(len(lens)), counts)
    starts = (np.arange(len(docs)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_len
    return Pieces(docs, starts, np.full(len(docs), row_len)), lens - counts * row_len


def _finish(
    pieces: Pieces, per_row: np.ndarray, rest: Pieces, drops: dict[str, np.ndarray], is_last: bool, num_docs: int
) -> Layout:
    """Keep the last, partly filled row for more documents, or drop it if there are none."""
    if not is_last:
        return Layout(pieces, per_row, rest, drops)
    return Layout(pieces, per_row, rest[:0], drops | {"last_row": rest.tokens_by_doc(num_docs)})


def _sums(keys: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sum values by key; exact, since no sum reaches 2**53."""
    return np.bincount(keys, weights=values, minlength=size).astype(np.int64)


def _arrays(pieces: Pieces) -> tuple[np.ndarray, ...]:
    return pieces.docs, pieces.starts, pieces.lens
