"""Parse a UtK row: which pieces belong together, and the labels and solutions in its special tokens.

Pieces are joined only if a solution in the row lists their labels. Otherwise only the part number is known, from the
special tokens around the piece.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from unspool.data.strategies.utk.special_tokens import ALL_KNOTS, KNOTS
from unspool.inspection.detokenize import Decoder
from unspool.inspection.items import ROLES

_KNOT, _LABEL = ROLES.index("knot"), ROLES.index("label")


@dataclass(frozen=True, kw_only=True)
class Piece:
    label: str | None = None
    part: int | None = None  # from 1; None for a document that was not split
    parts: int | None = None  # number of parts, if a solution lists them
    solution: list[str] = field(default_factory=list)
    group: int = 0  # document, numbered in order of appearance


def knows_special_tokens(decoder: Decoder | None) -> bool:
    return decoder is not None and -1 not in _ids(decoder)


def _ids(decoder: Decoder) -> list[int]:
    """Token ids in the order of `ALL_KNOTS`; -1 for a missing one of `KNOTS`; other missing ones are omitted."""
    found = {name: decoder.id_of(name) for name in ALL_KNOTS}
    return [-1 if id_ is None else id_ for name, id_ in found.items() if id_ is not None or name in KNOTS]


def mark_utk_roles(tokens: np.ndarray, roles: np.ndarray, decoder: Decoder) -> np.ndarray:
    """Mark UtK's special tokens, and the labels between them, in `roles`."""
    opening, closing, solution, _, ending, *_ = _ids(decoder)
    roles = roles.copy()
    roles[np.isin(tokens, _ids(decoder))] = _KNOT
    for begin, end in ((opening, closing), (solution, ending)):
        opened = np.cumsum(tokens == begin) - np.cumsum(tokens == end)
        roles[(opened > 0) & (roles != _KNOT)] = _LABEL
    return roles


def read_pieces(tokens: np.ndarray, doc_lens: np.ndarray, decoder: Decoder) -> list[Piece]:
    found = [_read(piece, decoder) for piece in np.split(tokens, np.cumsum(doc_lens)[:-1])]
    mates: dict[str, tuple[tuple[str, ...], int]] = {}  # label → its solution, its position in the solution
    for piece in found:
        for place, label in enumerate(piece.solution, start=1):
            mates[label] = (tuple(piece.solution), place)
    groups: dict[object, int] = {}
    pieces = []
    for number, piece in enumerate(found):
        mate = mates.get(piece.label) if piece.label else None
        group = groups.setdefault(mate[0] if mate else number, len(groups))
        pieces.append(
            Piece(
                label=piece.label,
                part=mate[1] if mate else piece.part,
                parts=len(mate[0]) if mate else None,
                solution=piece.solution,
                group=group,
            )
        )
    return pieces


def _read(tokens: np.ndarray, decoder: Decoder) -> Piece:
    opening, closing, solution, following, ending, *cuts = _ids(decoder)
    heads, tails = cuts[0::2], cuts[1::2]
    label = None
    at = 0
    if tokens[0] == opening and (tokens == closing).any():
        at = int(np.argmax(tokens == closing))
        label = decoder.text(tokens[1:at])
        at += 1
    part = None
    if at < len(tokens) and int(tokens[at]) in heads:
        part = heads.index(int(tokens[at])) + 2
    else:
        part = next((number for number, tail in enumerate(tails, start=1) if (tokens == tail).any()), None)
    listed: list[str] = []
    if (tokens == solution).any() and (tokens == ending).any():
        inside = tokens[int(np.argmax(tokens == solution)) + 1 : int(np.argmax(tokens == ending))]
        listed = [decoder.text(run[run != following]) for run in np.split(inside, np.flatnonzero(inside == following))]
    return Piece(label=label, part=part, solution=listed)


# Ranges of positions that are listed; further ones are only counted.
_MAX_STRETCHES = 4


def documents_of(chunk_ids: np.ndarray) -> list[int]:
    """Number the documents of pieces from 0, in order of appearance."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(doc, len(numbers)) for doc in chunk_ids.tolist()]


def known_facts(docs: Sequence[int], marks: Sequence[Piece] | None, *, ordered: bool) -> list[list[str]]:
    """Return facts of each piece if documents are recorded; `ordered`: pieces keep their order within the row."""
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
    """Return facts of each piece if only special tokens identify its document."""
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
    """Describe the position ids of a piece with skips: "positions 0–812, then 91,204–92,440"."""
    begins = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    ends = np.append(begins[1:], len(positions)) - 1
    pairs = zip(positions[begins].tolist(), positions[ends].tolist(), strict=True)
    stretches = [f"{first:,}–{last:,}" if last > first else f"{first:,}" for first, last in pairs]
    more = len(stretches) - _MAX_STRETCHES
    shown = ", then ".join(stretches[:_MAX_STRETCHES])
    return f"positions {shown}" + (f", then {more:,} more ranges" if more > 0 else "")


def _place(doc: int, part: int | None, nth: int, count: int) -> str:
    if count == 1:
        return f"the only piece of document {doc + 1} here"
    return f"part {part} of {count} of document {doc + 1}" if part else f"document {doc + 1}, {nth} of {count} here"
