"""A plain implementation of Untie the Knots, one token at a time, to compare with the fast code.

`slow_rows` draws the same numbers as `Tangler.pack`, one by one; the others know only tokens and knots.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

import numpy as np

from unspool.data.strategies.utk import UtK
from unspool.data.strategies.utk.special_tokens import DrawLabels


@dataclass
class SlowRow:
    tokens: list[int] = field(default_factory=list)
    doc_lens: list[int] = field(default_factory=list)
    chunk_ids: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)  # of documents, as far as the row holds them
    documents: list[int] = field(default_factory=list)  # their numbers
    cut: bool = False  # the last one continues after the row


@dataclass
class _Entry:
    hops: int
    points: list[float]
    labels: list[list[int]]
    draws: float


@dataclass
class _Unit:
    text: list[int]
    bounds: list[int]
    labels: list[list[int]]


def slow_rows(
    docs: Sequence[np.ndarray],
    row_len: int,
    config: UtK,
    knots: Mapping[str, int],
    draw_labels: DrawLabels,
    rng: np.random.Generator,
    *,
    keep_rest: bool,
) -> list[SlowRow]:
    """For the smallest number of labels before one repeats."""
    doc_rng, row_rng, doc_label_rng, row_label_rng, place_rng = rng.spawn(5)
    doc_labels, row_labels = _labels(draw_labels, doc_label_rng), _labels(draw_labels, row_label_rng)
    waiting = [
        (number, doc.tolist(), _entry(config, doc_rng, doc_labels, len(doc)))
        for number, doc in enumerate(docs)
        if len(doc)
    ]
    rest = False
    rows = []
    while True:
        row_entry = _entry(config, row_rng, row_labels, None)
        splits = config.per == "document" or row_entry.draws < config.probability
        row, units, room = SlowRow(), [], row_len
        while room:
            if not waiting:
                return rows
            number, text, entry = waiting.pop(0)
            unit, cost = _fit(text, row_entry if rest else entry, room, config, splits)
            room -= cost
            units.append(unit)
            row.documents.append(number)
            row.texts.append(unit.text)
            left = text[len(unit.text) :]
            rest = bool(left) and keep_rest
            row.cut = bool(left)
            if rest:
                waiting.insert(0, (number, left, entry))
        _write(row, units, config, list(knots.values()), place_rng)
        rows.append(row)


def _labels(draw_labels: DrawLabels, rng: np.random.Generator) -> Iterator[list[int]]:
    for _ in count():
        yield from (label.tolist() for label in draw_labels(1024, rng))


def _entry(config: UtK, rng: np.random.Generator, labels: Iterator[list[int]], length: int | None) -> _Entry:
    draws, kind = rng.random(), rng.random()
    points = [rng.random() for _ in range(7 if config.chunk else max(config.hops) - 1)]
    total = 0.0
    for hops, share in config.hops.items():  # noqa: B007
        total += share / sum(config.hops.values())
        if kind < total:
            break
    if config.chunk:
        hops = 1 if length is None else min(8, math.ceil(length / config.chunk))
    if config.per == "document" and draws >= config.probability:
        hops = 1
    if length is not None and length < max(config.min_split, hops):
        hops = 1
    drawn = [next(labels) for _ in range(hops)] if hops > 1 and config.backtrace else []
    return _Entry(hops, points, drawn, draws)


def _fit(text: list[int], entry: _Entry, room: int, config: UtK, splits: bool) -> tuple[_Unit, int]:
    """Return how much of a document fits into this room, and its cost."""
    hops = entry.hops if splits and len(text) >= max(config.min_split, entry.hops) else 1
    marks = 0
    if hops > 1:
        marks = 2 * (hops - 1)
        if config.backtrace:
            marks += 2 * hops + (hops + 1) + 2 * sum(map(len, entry.labels))
    if len(text) + marks <= room:
        return _Unit(text, _bounds(len(text), hops, entry.points, config), entry.labels if hops > 1 else []), len(
            text
        ) + marks
    if len(text) <= room:
        return _Unit(text, [0, len(text)], []), len(text)
    size = room - 2 * (hops - 1)
    if size < max(config.min_split, hops):
        hops, size = 1, room
    return _Unit(text[:size], _bounds(size, hops, entry.points, config), []), room


def _bounds(length: int, hops: int, draws: list[float], config: UtK) -> list[int]:
    if config.split == "equal" or config.chunk:
        return [length * number // hops for number in range(hops + 1)]
    free = list(range(1, length))
    points = [free.pop(int(draw * len(free))) for draw in draws[: hops - 1]]
    return [0, *sorted(points), length]


def _write(row: SlowRow, units: list[_Unit], config: UtK, knots: list[int], rng: np.random.Generator) -> None:
    opening, closing, solution, following, ending, *cuts = knots
    pieces = [(doc, part) for doc, unit in enumerate(units) for part in range(len(unit.bounds) - 1)]
    places = [rng.random() for _ in pieces]
    if row.cut:
        places[-1] = 2.0
    if config.preserve_order:
        for doc in range(len(units)):
            mine = [number for number, piece in enumerate(pieces) if piece[0] == doc]
            for number, place in zip(mine, sorted(places[number] for number in mine), strict=True):
                places[number] = place
    in_row = [piece for _, piece in sorted(zip(places, pieces, strict=True))]
    for number, (doc, part) in enumerate(in_row):
        unit, before = units[doc], len(row.tokens)
        if unit.labels:
            row.tokens += [opening, *unit.labels[part], closing]
        if part > 0:
            row.tokens.append(cuts[0::2][part - 1])
        row.tokens += unit.text[unit.bounds[part] : unit.bounds[part + 1]]
        if part < len(unit.bounds) - 2:
            row.tokens.append(cuts[1::2][part])
        if unit.labels and doc not in [other for other, _ in in_row[number + 1 :]]:
            row.tokens.append(solution)
            for index, label in enumerate(unit.labels):
                row.tokens += ([following] if index else []) + label
            row.tokens.append(ending)
        row.doc_lens.append(len(row.tokens) - before)
        row.chunk_ids.append(doc)


def slow_mask(tokens: Sequence[int], knots: Mapping[str, int], starts: Sequence[int]) -> list[bool]:
    """The paper's rules: no loss on knots, labels and <S>, nor at `starts`, where nothing of the document precedes."""
    opening, closing, solution, _, _, *cuts = knots.values()
    mask, in_label = [], False
    for place, token in enumerate(tokens):
        in_label = in_label or token == opening
        mask.append(not (in_label or token in cuts or token == solution or place in starts))
        in_label = in_label and token != closing
    return mask


def slow_released_mask(tokens: Sequence[int], knots: Mapping[str, int], eos: int) -> list[bool]:
    """The rules of the released code, token by token: may token i be a target, given token i - 1?"""
    opening, closing, solution, _, ending, *cuts = knots.values()
    mask, in_label = [False], tokens[0] == opening
    for given_token, target in pairwise(tokens):
        trained = not (
            given_token in cuts
            or target in cuts
            or in_label  # the input lies between <D> and </D>, both included
            or target in (opening, solution)
            or given_token in (ending, eos)
        )
        mask.append(trained)
        in_label = target == opening or (in_label and given_token != closing)
    return mask


def slow_solutions(tokens: Sequence[int], knots: Mapping[str, int]) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Find each <S>, and the labels between it and </S>."""
    _, _, solution, following, ending, *_ = knots.values()
    found = []
    for place in [place for place, token in enumerate(tokens) if token == solution]:
        parts: list[list[int]] = [[]]
        for token in tokens[place + 1 : list(tokens).index(ending, place)]:
            if token == following:
                parts.append([])
            else:
                parts[-1].append(token)
        found.append((place, [tuple(part) for part in parts]))
    return found


@dataclass(frozen=True)
class SlowPiece:
    doc: int
    part: int  # from 0
    start: int  # in the row
    label: tuple[int, ...] | None
    text: tuple[int, ...]
    has_tail: bool


def slow_pieces(
    tokens: Sequence[int], doc_lens: Sequence[int], chunk_ids: Sequence[int], knots: Mapping[str, int]
) -> list[SlowPiece]:
    """The pieces of a row, read one token at a time."""
    opening, closing, solution, _, _, *cuts = knots.values()
    pieces, start = [], 0
    for length, doc in zip(doc_lens, chunk_ids, strict=True):
        todo = list(tokens[start : start + length])
        label, part, text, has_tail = None, 0, [], False
        if todo[0] == opening:
            label = tuple(todo[1 : todo.index(closing)])
            todo = todo[todo.index(closing) + 1 :]
        if todo[0] in cuts[0::2]:
            part = cuts[0::2].index(todo.pop(0)) + 1
        for token in todo:
            if token in cuts[1::2]:
                has_tail = True
                assert cuts[1::2].index(token) == part, "a tail knot names the cut after its piece"
                break
            if token == solution:
                break
            text.append(token)
        pieces.append(SlowPiece(doc, part, start, label, tuple(text), has_tail))
        start += length
    return pieces
