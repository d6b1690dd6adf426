"""Pack tokenised documents into rows of equal length.

In: documents in the order they are to be packed. Out: `Row`s of `row_len` tokens.
Promise: every token that comes in is in a row or counted in `Tally.dropped` under its reason, also
when the consumer closes the generator early.
Modes: `concat` fills rows and continues a cut document at the start of the next; `intact` fills
rows and discards the rest of a cut document; `whole` cuts rows only from documents of at least a
row's length, so that every row is one document.
Elsewhere: files (store.py), tangled rows (tangle.py), which documents (rows.py).
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from unspool.data.store import Row


@dataclass(frozen=True, slots=True)
class Doc:
    """A tokenised document, or what is left of one."""

    tokens: np.ndarray
    source: str


@dataclass(slots=True)
class Tally:
    """Where tokens went: tokens in + added = tokens in rows + dropped."""

    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    added: int = 0  # by tangling


RowStream = Generator[Row, None, None]
Packer = Callable[[Iterable[Doc], int, Tally], RowStream]


class _Filling:
    """A row being filled."""

    def __init__(self, row_len: int) -> None:
        self._tokens = np.empty(row_len, dtype=np.uint32)
        self._lens: list[int] = []
        self._sources: dict[str, None] = {}
        self.filled = 0

    def add(self, doc: Doc) -> np.ndarray:
        """Take what fits and return the rest."""
        taken = doc.tokens[: len(self._tokens) - self.filled]
        self._tokens[self.filled : self.filled + len(taken)] = taken
        self.filled += len(taken)
        self._lens.append(len(taken))
        self._sources[doc.source] = None
        return doc.tokens[len(taken) :]

    def is_full(self) -> bool:
        return self.filled == len(self._tokens)

    def row(self) -> Row:
        return Row(self._tokens, np.array(self._lens, dtype=np.int32), None, "+".join(self._sources), "documents")


def pack_concat(docs: Iterable[Doc], row_len: int, tally: Tally) -> RowStream:
    filling = _Filling(row_len)
    rest = np.zeros(0, dtype=np.uint32)
    try:
        for doc in docs:
            rest = doc.tokens
            while len(rest):
                rest = filling.add(Doc(rest, doc.source))
                if filling.is_full():
                    full, filling = filling, _Filling(row_len)
                    yield full.row()
    finally:
        tally.dropped["last_row"] += filling.filled
        tally.dropped["limit"] += len(rest)


def pack_intact(docs: Iterable[Doc], row_len: int, tally: Tally) -> RowStream:
    filling = _Filling(row_len)
    try:
        for doc in docs:
            tally.dropped["cut"] += len(filling.add(doc))
            if filling.is_full():
                full, filling = filling, _Filling(row_len)
                yield full.row()
    finally:
        tally.dropped["last_row"] += filling.filled


def pack_whole(docs: Iterable[Doc], row_len: int, tally: Tally) -> RowStream:
    lens = np.array([row_len], dtype=np.int32)
    rest = 0
    try:
        for doc in docs:
            rest = whole_len(len(doc.tokens), row_len)
            tally.dropped["tail" if rest else "short"] += len(doc.tokens) - rest
            for start in range(0, rest, row_len):
                rest -= row_len
                yield Row(doc.tokens[start : start + row_len], lens, None, doc.source, "documents")
    finally:
        tally.dropped["limit"] += rest


PACKERS: dict[str, Packer] = {"concat": pack_concat, "intact": pack_intact, "whole": pack_whole}


def whole_len(doc_len: int, row_len: int) -> int:
    """The tokens of a document that `whole` keeps."""
    return doc_len // row_len * row_len


def interleave(useful: Sequence[np.ndarray], shares: Sequence[float]) -> Iterator[int]:
    """Which source gives its next document, so that the tokens taken so far follow `shares`.

    `useful[s][i]` counts the tokens that the i-th document of source s brings. Always the source
    that is furthest behind its share goes next. Ends when that source has no document left,
    because going on would break the shares.
    """
    goal = [share / sum(shares) for share in shares]
    taken = [0] * len(goal)
    used = [0] * len(goal)
    total = 0
    while True:
        source = max(range(len(goal)), key=lambda index: goal[index] * total - taken[index])
        if used[source] == len(useful[source]):
            return
        tokens = int(useful[source][used[source]])
        taken[source] += tokens
        total += tokens
        used[source] += 1
        yield source
