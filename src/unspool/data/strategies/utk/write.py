"""Write planned chunks with their special tokens: the tokens and the loss mask of tangled rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from unspool.data.strategies.utk.layout import Choices, Pieces, Units
from unspool.data.strategies.utk.special_tokens import LabelPool


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of units: `of_units[u, part]` is a label number n, with tokens[starts[n]:][: lens[n]]."""

    of_units: np.ndarray  # int64[units, most hops]
    is_used: np.ndarray  # bool[units]
    tokens: np.ndarray
    starts: np.ndarray
    lens: np.ndarray


def gather_labels(
    units: Units, docs: Choices, rows: Choices, pools: tuple[LabelPool, LabelPool], *, backtrace: bool
) -> Labels:
    """Gather the labels of documents and of rests at the beginning of rows, each from a separate pool."""
    of_docs, of_rows = pools
    numbers = np.concatenate([docs.labels, rows.labels + len(of_docs)])
    return Labels(
        numbers[units.entries],
        (units.hops > 1) & ~units.is_cut & backtrace,
        np.concatenate([of_docs.tokens, of_rows.tokens]),
        np.concatenate([of_docs.starts[:-1], of_rows.starts[:-1] + len(of_docs.tokens)]),
        np.concatenate([np.diff(of_docs.starts), np.diff(of_rows.starts)]),
    )


@dataclass(frozen=True, slots=True)
class Written:
    tokens: np.ndarray  # uint32
    loss_mask: np.ndarray  # bool, over target tokens
    piece_lens: np.ndarray  # int32, with marks
    added: np.ndarray  # bool: the marks
    differing: np.ndarray  # int64: tokens that only one of the two masks excludes


def write(
    pieces: Pieces,
    units: Units,
    texts: Sequence[np.ndarray],
    labels: Labels,
    knots: Sequence[int],
    masks: Sequence[np.ndarray] = (),
    mask: Literal["paper", "released"] = "paper",
) -> Written:
    """Write pieces with marks. `knots` are the ids in the order of the names; `masks` are the documents', if any.

    Knots, labels and <S> have no loss; the labels after <S> do. The released code also masks the first token of text
    after a head knot or label, because it masks the token after a masked one.
    """
    room = _room(pieces, units, labels)
    marks = _marks(pieces, units, labels, room, knots)

    # Marks and texts alternate: the marks after one text and those before the next are one stretch.
    parts: list[np.ndarray] = [marks] * (2 * len(pieces) + 1)
    borders = [0, *room.afters.tolist(), len(marks)]
    parts[0::2] = [marks[start:stop] for start, stop in pairwise(borders)]
    columns = (units.docs[pieces.units], pieces.starts, pieces.starts + pieces.lens)
    places = [*zip(*(each.tolist() for each in columns), strict=True)]
    parts[1::2] = [texts[doc][start:stop] for doc, start, stop in places]
    tokens = np.concatenate(parts, dtype=np.uint32)
    part_lens = np.empty(len(parts), dtype=np.int64)
    part_lens[0::2], part_lens[1::2] = np.diff(borders), pieces.lens
    added = np.repeat(np.arange(len(parts)) % 2 == 0, part_lens)

    before, after = room.before, room.after
    piece_lens = before + pieces.lens + after
    begins = np.cumsum(piece_lens) - piece_lens
    text_begins = begins + before
    loss = np.ones(len(tokens), dtype=np.bool_)
    if masks:
        loss[_ragged(text_begins, pieces.lens)] = np.concatenate(
            [masks[doc][start:stop] for doc, start, stop in places]
        )
    # The first token of a piece is never predicted; all marks before its text have no loss.
    loss[_ragged(begins, np.maximum(before, 1))] = False
    # The first token after the text, a tail knot or <S>, and <S> after a tail knot.
    text_ends = text_begins + pieces.lens
    loss[text_ends[after > 0]] = False
    loss[(text_ends + 1)[room.has_tail & room.has_solution]] = False
    firsts = text_begins[before > 0]
    differing = firsts[loss[firsts]]
    if mask == "released":
        loss[differing] = False
    return Written(tokens, loss, piece_lens.astype(np.int32), added, differing)


@dataclass(frozen=True, slots=True)
class _Room:
    """Number of marks around each piece's text."""

    before: np.ndarray
    after: np.ndarray
    has_tail: np.ndarray  # bool
    has_solution: np.ndarray  # bool

    @property
    def ends(self) -> np.ndarray:
        """Return the end of each piece's marks, among all marks."""
        return np.cumsum(self.before + self.after)

    @property
    def afters(self) -> np.ndarray:
        """Return the start of the marks after each piece's text."""
        afters: np.ndarray = self.ends - self.after
        return afters


def _room(pieces: Pieces, units: Units, labels: Labels) -> _Room:
    label_lens = np.zeros_like(labels.of_units)
    used = labels.is_used[:, None] & (np.arange(labels.of_units.shape[1]) < units.hops[:, None])
    label_lens[used] = labels.lens[labels.of_units[used]]
    is_labelled = labels.is_used[pieces.units]
    before = np.where(is_labelled, label_lens[pieces.units, pieces.parts] + 2, 0) + (pieces.parts > 0)
    has_tail = pieces.parts < units.hops[pieces.units] - 1
    has_solution = is_labelled & pieces.is_last
    solution = (label_lens.sum(axis=1) + units.hops + 1)[pieces.units]
    return _Room(before, np.where(has_solution, solution, 0) + has_tail, has_tail, has_solution)


def _marks(pieces: Pieces, units: Units, labels: Labels, room: _Room, knots: Sequence[int]) -> np.ndarray:
    """Concatenate all marks: for each piece, those before its text, then those after it."""
    label_open, label_close, solution_open, solution_next, solution_close, *cuts = knots
    heads, tails = np.array(cuts[0::2], dtype=np.uint32), np.array(cuts[1::2], dtype=np.uint32)
    afters = room.afters
    befores = afters - room.before
    marks = np.empty(int((room.before + room.after).sum()), dtype=np.uint32)

    labelled = np.flatnonzero(labels.is_used[pieces.units])
    names = labels.of_units[pieces.units[labelled], pieces.parts[labelled]]
    marks[befores[labelled]] = label_open
    _write_labels(marks, befores[labelled] + 1, names, labels)
    marks[befores[labelled] + 1 + labels.lens[names]] = label_close
    later = np.flatnonzero(pieces.parts > 0)
    marks[afters[later] - 1] = heads[pieces.parts[later] - 1]
    marks[afters[room.has_tail]] = tails[pieces.parts[room.has_tail]]

    # One entry for each label of each solution, which is written with the mark before it.
    solved = np.flatnonzero(room.has_solution)
    counts = units.hops[pieces.units[solved]]
    which = np.repeat(np.arange(len(solved)), counts)
    parts = np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
    listed = labels.of_units[pieces.units[solved][which], parts]
    sizes = labels.lens[listed] + 1
    within = np.cumsum(sizes) - sizes
    firsts = np.flatnonzero(parts == 0)
    places = (afters + room.has_tail)[solved][which] + within - within[firsts][which]
    marks[places] = np.where(parts == 0, solution_open, solution_next)
    _write_labels(marks, places + 1, listed, labels)
    lasts = firsts + counts - 1
    marks[places[lasts] + sizes[lasts]] = solution_close
    return marks


def _write_labels(marks: np.ndarray, places: np.ndarray, numbers: np.ndarray, labels: Labels) -> None:
    lens = labels.lens[numbers]
    marks[_ragged(places, lens)] = labels.tokens[_ragged(labels.starts[numbers], lens)]


def _ragged(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Concatenate ranges: lens[0] numbers from starts[0], then lens[1] numbers from starts[1], and so on."""
    before = np.cumsum(lens) - lens
    return np.repeat(starts - before, lens) + np.arange(int(lens.sum()))
