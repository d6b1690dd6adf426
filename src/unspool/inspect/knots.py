"""Read a tangled row back: which pieces belong together, and what its marks say (see data/tangle.py).

In: a row's tokens and piece lengths, a decoder that knows the knots. Out: roles of tokens, and per piece the
label, which part of which document it is, and the labels its solution lists.
Promise: pieces are joined only where a solution in the row names their labels; otherwise only the part's number
is told, which its knots give.
"""

from dataclasses import dataclass, field

import numpy as np

from unspool.data.knots import ALL_KNOTS, KNOTS
from unspool.inspect.decode import Decoder
from unspool.inspect.views import ROLES

_KNOT, _LABEL = ROLES.index("knot"), ROLES.index("label")


@dataclass(frozen=True, kw_only=True)
class Piece:
    label: str | None = None
    part: int | None = None  # from 1; None for a document that was not split
    parts: int | None = None  # of how many, where a solution tells
    solution: list[str] = field(default_factory=list)
    group: int = 0  # the document, numbered as they first appear


def has_knots(decoder: Decoder | None) -> bool:
    return decoder is not None and -1 not in _ids(decoder)


def _ids(decoder: Decoder) -> list[int]:
    """In the order of `ALL_KNOTS`; -1 for one of `KNOTS` that the tokenizer lacks, which may well lack the others."""
    found = {name: decoder.id_of(name) for name in ALL_KNOTS}
    return [-1 if id_ is None else id_ for name, id_ in found.items() if id_ is not None or name in KNOTS]


def mark_roles(tokens: np.ndarray, roles: np.ndarray, decoder: Decoder) -> np.ndarray:
    """`roles` with knots, and the labels between them, told from other control tokens."""
    opening, closing, solution, _, ending, *_ = _ids(decoder)
    roles = roles.copy()
    roles[np.isin(tokens, _ids(decoder))] = _KNOT
    for begin, end in ((opening, closing), (solution, ending)):
        opened = np.cumsum(tokens == begin) - np.cumsum(tokens == end)
        roles[(opened > 0) & (roles != _KNOT)] = _LABEL
    return roles


def read_pieces(tokens: np.ndarray, doc_lens: np.ndarray, decoder: Decoder) -> list[Piece]:
    found = [_read(piece, decoder) for piece in np.split(tokens, np.cumsum(doc_lens)[:-1])]
    mates: dict[str, tuple[tuple[str, ...], int]] = {}  # label → its solution, its place in there
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
