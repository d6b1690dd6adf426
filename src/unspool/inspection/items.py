"""What is shown of a row or a document, ready for terminal, page and JSON.

In: tokens with what is known about them. Out: `Item`s made of `Part`s (a document, or a piece of a tangled
row) made of `Span`s (text that looks alike).
Promise: nothing is claimed that the tokens do not show; what is left out for space is counted.
Elsewhere: spelling tokens (decode.py), tangled rows (knots.py), drawing (terminal.py, page.py).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.rng import rng_for
from unspool.inspection.dataset_summary import Summary
from unspool.inspection.detokenize import Decoder
from unspool.inspection.run_paths import Entry

# Text as something a terminal or a page can show: nothing invisible, nothing that moves other text about.


NEWLINE = "↵"
SPACE = "␣"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TAB = "⇥   "
# C1 controls, line separators, zero-width spaces, marks that turn the direction of writing, and tags, which spell
# text that nobody sees. Joiners stay: words of Persian, Hindi and many emoji need them.
_UNSEEN = re.compile(
    "[\u0080-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Line breaks stay; tabs and other control characters get a sign, what cannot be seen its number."""
    text = text.replace("\t", _TAB)
    text = _CONTROL.sub(lambda found: "\u2421" if found[0] == "\x7f" else chr(0x2400 + ord(found[0])), text)
    return _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


def one_line(text: str) -> str:
    return visible(text).replace("\n", NEWLINE)


def raw_bytes(data: bytes) -> str:
    r"""Bytes that are no text of their own: `\xe2\x80`."""
    return "".join(f"\\x{byte:02x}" for byte in data)


Role = Literal["text", "control", "knot", "label", "hidden", "bad"]
# In the order of the codes that arrays of roles hold.
ROLES: tuple[Role, ...] = ("text", "control", "knot", "label")


@dataclass(frozen=True, slots=True)
class Span:
    text: str  # as it is; `visible` makes it safe to show
    role: Role
    loss: bool = True  # whether its tokens are asked for in training
    ids: tuple[int, ...] = ()  # one id: the span is a token shown with its border


@dataclass(frozen=True, kw_only=True)
class Part:
    """A document of a row, or what there is of it."""

    title: str  # "document 3 of 7"
    length: int
    unit: str = "tokens"
    facts: list[str] = field(default_factory=list)  # "cut at the start"
    spans: list[Span] = field(default_factory=list)
    group: int = 0  # parts of one document share it
    start: int = 0  # in the row
    trained: int | None = None  # tokens that carry loss, where a mask leaves out others; it is then shown which


@dataclass(frozen=True, kw_only=True)
class Item:
    """A row, a document, or a record of an input file."""

    index: int
    name: str  # "row 12"
    among: str  # "of 0–463"; empty where nobody knows how many there are
    facts: list[str]
    parts: list[Part]

    @property
    def title(self) -> str:
        return f"{self.name} {self.among}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Show:
    """How much of a part is shown, and how."""

    tokens: bool = False  # borders and ids instead of running text
    head: int | None = None  # tokens shown at the start of a long part; None: all of it
    tail: int = 0

    def is_long(self, length: int) -> bool:
        # Leaving out a few tokens would cost a reader more than it saves.
        return self.head is not None and length > 1.4 * (self.head + self.tail)


def spans_of(
    tokens: np.ndarray, roles: np.ndarray, loss: np.ndarray, decoder: Decoder | None, show: Show
) -> list[Span]:
    """A part's tokens as spans, those in the middle of a long one left out."""
    count = len(tokens)
    head, tail = count, count
    if show.is_long(count):
        assert show.head is not None
        head, tail = show.head, count - show.tail
        if decoder is not None:
            head, tail = decoder.next_border(tokens, head), decoder.next_border(tokens, tail)
    spans = _stretch(tokens[:head], roles[:head], loss[:head], decoder, show)
    if tail > head:
        spans.append(Span(f"{tail - head:,} tokens hidden", "hidden"))
        spans += _stretch(tokens[tail:], roles[tail:], loss[tail:], decoder, show)
    return spans


def trained_runs(spans: Sequence[Span]) -> Iterator[tuple[bool, list[Span]]]:
    """Spans in runs that carry loss or do not; what is hidden stands alone, and whether it does is not known."""
    for (is_hidden, loss), run in groupby(spans, lambda span: (span.role == "hidden", span.loss)):
        yield loss and not is_hidden, list(run)


def text_spans(text: str, show: Show, *, chars_per_token: int = 4) -> list[Span]:
    """The same for text that was never tokenised."""
    if show.head is None or not show.is_long(len(text) // chars_per_token):
        return [Span(text, "text")]
    head, tail = show.head * chars_per_token, len(text) - show.tail * chars_per_token
    return [
        Span(text[:head], "text"),
        Span(f"{tail - head:,} characters hidden", "hidden"),
        Span(text[tail:], "text"),
    ]


def control_roles(tokens: np.ndarray, decoder: Decoder | None) -> np.ndarray:
    """Codes of `ROLES`: control tokens and ids beyond the vocabulary apart from text."""
    if decoder is None:
        return np.zeros(len(tokens), dtype=np.uint8)
    return np.isin(tokens, list(decoder.special)).astype(np.uint8)


def _stretch(
    tokens: np.ndarray, roles: np.ndarray, loss: np.ndarray, decoder: Decoder | None, show: Show
) -> list[Span]:
    if not len(tokens):
        return []
    if show.tokens or decoder is None:
        return [
            Span(_token_text(token, decoder), ROLES[role], bool(asked), (token,))
            for token, role, asked in zip(tokens.tolist(), roles.tolist(), loss.tolist(), strict=True)
        ]
    changes = np.flatnonzero((np.diff(roles) != 0) | (np.diff(loss) != 0)) + 1
    runs = np.split(tokens, changes)
    firsts = [0, *changes.tolist()]
    texts = decoder.texts(runs)
    return [
        Span(text, ROLES[roles[first]], bool(loss[first])) for text, first in zip(texts, firsts, strict=True) if text
    ]


def _token_text(token: int, decoder: Decoder | None) -> str:
    """One token on one line; its bytes where it is only part of a character."""
    if decoder is None:
        return ""
    data = decoder.bytes_of(token)
    try:
        return data.decode("utf-8").replace("\n", NEWLINE).replace(" ", SPACE)
    except UnicodeDecodeError:
        return raw_bytes(data)


def shown_line(parts: Sequence[str]) -> str:
    """Facts on one line, whatever was in them."""
    return " · ".join(one_line(part) for part in parts if part)


# Which rows or documents are shown.


def choose(candidates: Sequence[int], count: int, seed: int) -> list[int]:
    """The first candidate and `count - 1` others drawn by the seed, in order."""
    if not candidates:
        return []
    others = min(count, len(candidates)) - 1
    drawn = (
        rng_for(seed, "look").choice(len(candidates) - 1, size=others, replace=False) if others else np.zeros(0, int)
    )
    return [candidates[place] for place in [0, *sorted((drawn + 1).tolist())]]


def check_index(index: int, total: int, name: str) -> int:
    if 0 <= index < total:
        return index
    there = f"there are {total:,} {name}s, 0 to {total - 1}" if total > 1 else f"there is one {name}, number 0"
    raise ConfigError(f"--index {index}: {there if total else f'there is no {name}'}.")


# What `--json` prints: the same as the other views, as plain values, with texts as they are.


def summary_values(summary: Summary) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "kind": summary.kind,
        "headline": summary.headline,
        "facts": dict(summary.facts),
        "lengths": summary.bins,
        "lengths_of": summary.part,
        "sample": summary.sample,
        "notes": summary.notes,
    }


def item_values(item: Item, name: str) -> dict[str, Any]:
    return {name: item.index, "facts": [fact for fact in item.facts if fact], "parts": [*map(_part, item.parts)]}


def listing_values(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in entries]


def _part(part: Part) -> dict[str, Any]:
    return {
        "title": part.title,
        "start": part.start,
        "length": part.length,
        "unit": part.unit,
        "facts": part.facts,
        "trained": part.trained,
        "group": part.group,
        "spans": [
            {"text": span.text, "role": span.role, "loss": span.loss} | ({"id": span.ids[0]} if span.ids else {})
            for span in part.spans
        ],
    }
