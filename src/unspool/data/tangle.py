"""Untie the Knots: split documents, scatter the pieces over the row, ask for the way back.

In: documents, EOS appended. Out: one row of exactly `row_len` tokens, its loss mask and its pieces.

A document is split with `probability` into 2 or 3 pieces at random points. A piece of a split document reads

    <D> label </D>  <head knot>  text  <tail knot>

without head knot if it is the first piece and without tail knot if it is the last. Knots are named by
the cut (t1 … h1, t2 … h2) and shared by all documents. After the piece that lands last in the row,
and after its EOS if it has one, follows the solution: <S> label <s> label … </S>, labels in original order.

Positions are shuffled over the row and, with `preserve_order`, sorted within each document.

The row is filled by drawing fewer tokens. The last document is cut where the row ends: it may be
split, but gets neither labels nor solution, and its last piece stays at the row's end. A document
that would fit only without marks is not split. Without `backtrace` no document gets labels.

Loss mask, over target tokens (labels.py): none where the input or the target is a knot, on inputs
from <D> through </D>, where the target is <D> or <S>, and where the input is </S> or EOS. Labels in the
solution, <s> and </S> are trained on. Since pieces end in EOS, a knot or </S>, or at the row's end, these
rules say the same as: never the marks before a piece's text, never its first token, never a tail knot or <S>.
That is what is written, because it also holds for documents without EOS (cut by `longest`).

Differs from the public code: the solution of the last document is right (there it mixes up indices
within the document and within the row), and no solution is cut off by the row's end.
Elsewhere: which documents, and writing the rows (rows.py).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from unspool.data.config import RowsConfig, TangleConfig
from unspool.data.pack import Doc, RowStream, Tally
from unspool.data.store import Row
from unspool.data.tokens import Encoder, build_encoder

# In the order in which they are added to a tokenizer, so that their ids are the same everywhere.
KNOTS = (
    "<|knot:D|>",
    "<|knot:/D|>",
    "<|knot:S|>",
    "<|knot:s|>",
    "<|knot:/S|>",
    "<|knot:h1|>",
    "<|knot:t1|>",
    "<|knot:h2|>",
    "<|knot:t2|>",
)
LABEL_CHARS = 6
_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", dtype=np.uint8)
_LABELS_AT_ONCE = 1024


def knot_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The ids of `KNOTS` in `tokenizer`, which gets those that it lacks; give it a copy if that matters."""
    # Special, so that a document that spells a knot is not parsed into one.
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in KNOTS], special_tokens=True)
    return {name: int(tokenizer.convert_tokens_to_ids(name)) for name in KNOTS}


def draw_labels(encoder: Encoder, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless random labels, tokenised; in batches, because one by one tokenising would take most of the time."""
    while True:
        drawn = _ALPHABET[rng.integers(len(_ALPHABET), size=(_LABELS_AT_ONCE, LABEL_CHARS))]
        yield from encoder.encode_plain([label.tobytes().decode() for label in drawn])


class Piece(NamedTuple):
    """One contiguous piece of a row: where it begins, and which text of which document it holds."""

    doc: int  # index into the documents given
    part: int  # which piece of its document, from 0
    start: int  # in the row, marks included
    text_start: int  # in the row
    text_len: int


@dataclass(frozen=True, slots=True)
class Tangled:
    tokens: np.ndarray  # uint32[row_len]
    doc_lens: np.ndarray  # int32, the lengths of the pieces with their marks
    loss_mask: np.ndarray  # bool[row_len], over target tokens
    pieces: list[Piece]  # in row order
    text_tokens: int  # tokens of the documents in the row, taken from the front; the others are marks


@dataclass(slots=True)
class _Plan:
    """What becomes of one document: its text between `bounds`, and a label for each piece or none at all."""

    tokens: np.ndarray
    bounds: list[int]
    labels: list[np.ndarray]


def tangle_row(
    docs: Sequence[np.ndarray],
    row_len: int,
    config: TangleConfig,
    knots: dict[str, int],
    labels: Iterator[np.ndarray],
    rng: np.random.Generator,
) -> Tangled:
    """Tangle documents from the front of `docs`, which must hold at least `row_len` tokens."""
    plans = _plan(docs, row_len, config, labels, rng)
    owner = np.repeat(np.arange(len(plans)), [len(plan.bounds) - 1 for plan in plans])
    is_cut = plans[-1].bounds[-1] < len(docs[len(plans) - 1])
    places = _places(owner, is_cut, config.preserve_order, rng)
    return _write(plans, owner.tolist(), places, row_len, [knots[name] for name in KNOTS])


def untangle(tangled: Tangled) -> list[np.ndarray]:
    """The documents of a row, put together again; the last one as far as the row holds it."""
    parts: dict[int, dict[int, np.ndarray]] = {}
    for piece in tangled.pieces:
        text = tangled.tokens[piece.text_start : piece.text_start + piece.text_len]
        parts.setdefault(piece.doc, {})[piece.part] = text
    return [np.concatenate([texts[index] for index in range(len(texts))]) for _, texts in sorted(parts.items())]


@dataclass
class Tangler:
    """Packs a stream of documents into tangled rows; `pack` is a `Packer` (pack.py)."""

    config: TangleConfig
    knots: dict[str, int]
    labels: Iterator[np.ndarray]
    rng: np.random.Generator
    keep_rest: bool  # of a cut document, as the first document of the next row

    def pack(self, docs: Iterable[Doc], row_len: int, tally: Tally) -> RowStream:
        waiting: deque[Doc] = deque()
        held = 0
        try:
            for doc in docs:
                waiting.append(doc)
                held += len(doc.tokens)
                while held >= row_len:
                    row, taken = self._next_row(waiting, row_len, tally)
                    held -= taken
                    yield row
        finally:
            for doc in waiting:
                tally.drop("last_row", doc.source, len(doc.tokens))

    def _next_row(self, waiting: deque[Doc], row_len: int, tally: Tally) -> tuple[Row, int]:
        """A row, and how many of the waiting tokens it used up."""
        texts = [doc.tokens for doc in waiting]
        tangled = tangle_row(texts, row_len, self.config, self.knots, self.labels, self.rng)
        tally.added += row_len - tangled.text_tokens
        sources: dict[str, None] = {}
        left = tangled.text_tokens
        while left:
            doc = waiting.popleft()
            sources[doc.source] = None
            rest = doc.tokens[left:]
            left -= len(doc.tokens) - len(rest)
        if len(rest) and self.keep_rest:
            waiting.appendleft(Doc(rest, doc.source))
            rest = rest[:0]
        tally.drop("cut", doc.source, len(rest))
        row = Row(tangled.tokens, tangled.doc_lens, tangled.loss_mask, "+".join(sources), "full")
        return row, tangled.text_tokens + len(rest)


def build_tangler(config: RowsConfig, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator) -> Tangler:
    """`tokenizer` gets the knots that it lacks."""
    assert config.tangle is not None
    knots = knot_ids(tokenizer)
    labels = draw_labels(build_encoder(tokenizer), rng)
    return Tangler(config.tangle, knots, labels, rng, keep_rest=config.pack == "concat")


def _plan(
    docs: Sequence[np.ndarray],
    row_len: int,
    config: TangleConfig,
    labels: Iterator[np.ndarray],
    rng: np.random.Generator,
) -> list[_Plan]:
    plans: list[_Plan] = []
    room = row_len
    draws = rng.random((len(docs), 1 + max(config.hops))).tolist()
    for tokens, (split, kind, *points) in zip(docs, draws, strict=True):
        length = len(tokens)
        hops = _hops(kind, config) if split < config.probability and length >= max(config.min_split, 3) else 1
        drawn = [next(labels) for _ in range(hops)] if hops > 1 and config.backtrace else []
        cost = length + _num_marks(hops, drawn)
        if cost > room and length <= room:
            hops, drawn, cost = 1, [], length
        if cost > room:
            # Cut: the knots come out of the text's room, and there are neither labels nor solution.
            length = room - _num_marks(hops, [])
            if length < max(config.min_split, 3):
                hops, length = 1, room
            drawn, cost = [], room
        plans.append(_Plan(tokens, [0, *_split_points(points[: hops - 1], length), length], drawn))
        room -= cost
        if not room:
            return plans
    raise AssertionError(f"{room} tokens short of a row")


def _hops(draw: float, config: TangleConfig) -> int:
    left = draw * sum(config.hops.values())
    for hops, share in config.hops.items():
        left -= share
        if left < 0:
            return hops
    return max(config.hops)


def _split_points(draws: list[float], length: int) -> list[int]:
    """Distinct points in 1 … length - 1, uniform without replacement, sorted."""
    points: list[int] = []
    for taken, draw in enumerate(draws):
        point = 1 + int(draw * (length - 1 - taken))
        for other in points:
            point += point >= other
        points.append(point)
        points.sort()
    return points


def _num_marks(hops: int, labels: list[np.ndarray]) -> int:
    """Tokens that splitting adds: knots; with labels also <D></D> per piece and <S>, <s>…, </S>, labels twice."""
    knots = 2 * (hops - 1)
    return knots + 2 * hops + hops + 1 + 2 * sum(map(len, labels)) if labels else knots


def _places(owner: np.ndarray, pin_last: bool, preserve_order: bool, rng: np.random.Generator) -> np.ndarray:
    """The place in the row of each piece; pieces are given document by document."""
    count = len(owner)
    places = np.append(rng.permutation(count - 1), count - 1) if pin_last else rng.permutation(count)
    return places[np.lexsort((places, owner))] if preserve_order else places


def _write(plans: list[_Plan], owner: list[int], places: np.ndarray, row_len: int, knots: list[int]) -> Tangled:
    marks = [np.array([knot], dtype=np.uint32) for knot in knots]
    label_open, label_close, solution_open, solution_next, solution_close, *cuts = marks
    heads, tails = cuts[0::2], cuts[1::2]
    mask = np.ones(row_len, dtype=np.bool_)
    firsts = np.flatnonzero(np.diff(owner, prepend=-1)).tolist()  # each document's first piece
    last_places = np.maximum.reduceat(places, firsts).tolist()
    pieces: list[Piece] = []
    parts: list[np.ndarray] = []
    at = 0  # tokens in `parts`
    for place, number in enumerate(np.argsort(places).tolist()):
        doc = owner[number]
        plan, index, start = plans[doc], number - firsts[doc], at
        if plan.labels:
            parts += (label_open, plan.labels[index], label_close)
            at += len(plan.labels[index]) + 2
        if index > 0:
            parts.append(heads[index - 1])
            at += 1
        mask[start : at + 1] = False
        text_len = plan.bounds[index + 1] - plan.bounds[index]
        pieces.append(Piece(doc, index, start, at, text_len))
        parts.append(plan.tokens[plan.bounds[index] : plan.bounds[index + 1]])
        at += text_len
        if index < len(plan.bounds) - 2:
            mask[at] = False
            parts.append(tails[index])
            at += 1
        if plan.labels and place == last_places[doc]:
            mask[at] = False
            parts += (solution_open, plan.labels[0])
            for label in plan.labels[1:]:
                parts += (solution_next, label)
            parts.append(solution_close)
            at += sum(map(len, plan.labels)) + len(plan.labels) + 1
    assert at == row_len
    lens = np.diff([piece.start for piece in pieces], append=row_len).astype(np.int32)
    return Tangled(np.concatenate(parts), lens, mask, pieces, sum(piece.text_len for piece in pieces))
