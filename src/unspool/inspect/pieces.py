"""What the pieces of a row are: which part of which document, under which label, at which positions.

In: a row's own record of its documents (`piece_docs`), and what its marks say (knots.py), where there are any.
Out: for each piece the document it belongs to and facts in words.
Promise: with `piece_docs` documents are certain; without, pieces belong together only where a solution says so. A
part has a number only where its knots or the order of the row give it.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from unspool.inspect.knots import Piece

# Stretches of positions that are told apart before the rest is only counted.
_MOST_STRETCHES = 4


def documents_of(piece_docs: np.ndarray) -> list[int]:
    """The documents of pieces, numbered from 0 as they first appear."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(doc, len(numbers)) for doc in piece_docs.tolist()]


def known_facts(docs: Sequence[int], marks: Sequence[Piece] | None, *, ordered: bool) -> list[list[str]]:
    """Facts of each piece where its document is certain; `ordered` says that pieces keep their order in the row."""
    counts = Counter(docs)
    seen: Counter[int] = Counter()
    facts = []
    for number, doc in enumerate(docs):
        seen[doc] += 1
        mark = marks[number] if marks else Piece()
        part = mark.part or (seen[doc] if ordered else None)
        facts.append([_place(doc, part, seen[doc], counts[doc]), *mark_facts(mark)])
    return facts


def read_facts(marks: Sequence[Piece]) -> list[list[str]]:
    """Facts of each piece where only marks tell of its document."""
    facts = []
    for mark in marks:
        place = f"part {mark.part}" if mark.part else "not split"
        if mark.parts:
            place = f"part {mark.part} of {mark.parts} of document {mark.group + 1}"
        facts.append([place, *mark_facts(mark)])
    return facts


def mark_facts(mark: Piece) -> list[str]:
    return [
        f"label {mark.label}" if mark.label else "",
        f"ends with the solution {' '.join(mark.solution)}" if mark.solution else "",
    ]


def position_fact(positions: np.ndarray) -> str:
    """Where a piece stands if positions are skipped: "positions 0–812, then 91,204–92,440"."""
    begins = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    ends = np.append(begins[1:], len(positions)) - 1
    pairs = zip(positions[begins].tolist(), positions[ends].tolist(), strict=True)
    stretches = [f"{first:,}–{last:,}" if last > first else f"{first:,}" for first, last in pairs]
    more = len(stretches) - _MOST_STRETCHES
    shown = ", then ".join(stretches[:_MOST_STRETCHES])
    return f"positions {shown}" + (f", then {more:,} more stretches" if more > 0 else "")


def _place(doc: int, part: int | None, nth: int, count: int) -> str:
    if count == 1:
        return f"the only piece of document {doc + 1} here"
    return f"part {part} of {count} of document {doc + 1}" if part else f"document {doc + 1}, {nth} of {count} here"
