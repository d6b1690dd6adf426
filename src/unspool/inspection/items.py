"""Parts of a row, document or record for terminal, page and JSON, and summaries of whole datasets.

An `Item` consists of `Part`s (a document, or a piece of one), which consist of `Span`s (text of one style). Tokens
omitted to save space are counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unspool.core.errors import ConfigError
from unspool.core.formatting import NEWLINE, format_manifest_count, one_line
from unspool.core.rng import rng_for
from unspool.data.lengths import Histogram, histogram
from unspool.inspection.detokenize import Decoder
from unspool.inspection.run_paths import Entry

SPACE = "␣"
_BINS = 8
_BAR = 40  # characters of the longest bar of a histogram


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A corpus, a dataset or an input file as a whole."""

    path: Path
    kind: str  # "rows", "documents", "records"
    headline: str  # "464 rows of 2K tokens"
    facts: list[tuple[str, str]]
    part: str = "document"  # unit that `lengths` measures
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    sample: str = ""  # the rows with measured lengths, unless all
    num_documents: int | None = None  # documents that the parts are from, if they are not the parts themselves
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # shown as they are, such as a histogram

    @property
    def bins(self) -> Histogram:
        return histogram(self.lengths[self.lengths > 0])

    @property
    def of_documents(self) -> str:
        if self.num_documents is None:
            return ""
        return f" of {self.num_documents:,} {'document' if self.num_documents == 1 else 'documents'}"

    @property
    def length_line(self) -> str:
        if not len(self.lengths):
            return ""
        median, most = np.quantile(self.lengths, [0.5, 0.9], method="lower").tolist()
        line = (
            f"{self.part}s: {len(self.lengths):,}{self.of_documents}, median {median:,.0f} tokens, "
            f"90% have at most {most:,.0f}, longest {self.lengths.max():,}"
        )
        return f"{line} ({self.sample})" if self.sample else line


def manifest_facts(counts: dict[str, Any]) -> list[tuple[str, str]]:
    """Format all counts of a manifest: `tokens_in` becomes "tokens in", reasons are on one line."""
    # Tables, such as lengths by source, do not fit on a line.
    simple = {
        name: value
        for name, value in counts.items()
        if isinstance(value, bool | int | float | str)
        or (isinstance(value, dict) and value and all(isinstance(number, int) for number in value.values()))
    }
    facts = [(name.replace("_", " "), format_manifest_count(value)) for name, value in simple.items()]
    return [(name, shown) for name, shown in facts if shown]


def histogram_lines(values: np.ndarray, name: str) -> list[str]:
    """Return a histogram, a line for each of 8 equal intervals; empty without values."""
    if not len(values):
        return []
    counts, edges = np.histogram(values, bins=_BINS)
    bars = ["█" * round(_BAR * count / counts.max()) for count in counts.tolist()]
    width = len(f"{counts.max():,}")
    return [
        f"{name} {low:8.4f} to {high:8.4f}  {count:{width},}  {bar}".rstrip()
        for low, high, count, bar in zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), bars, strict=True)
    ]


def raw_bytes(data: bytes) -> str:
    r"""Format bytes of an incomplete character, as `\xe2\x80`."""
    return "".join(f"\\x{byte:02x}" for byte in data)


Role = Literal["text", "control", "knot", "label", "hidden", "bad"]
# Arrays of roles hold indices into this tuple.
ROLES: tuple[Role, ...] = ("text", "control", "knot", "label")


@dataclass(frozen=True, slots=True)
class Span:
    text: str  # unescaped; `visible` makes it safe to show
    role: Role
    loss: bool = True  # whether its tokens are trained on
    ids: tuple[int, ...] = ()  # one id if the span is a single token


@dataclass(frozen=True, kw_only=True)
class Part:
    """A document of a row, or a piece of one."""

    title: str  # "document 3 of 7"
    length: int
    unit: str = "tokens"
    facts: list[str] = field(default_factory=list)  # "cut at the start"
    spans: list[Span] = field(default_factory=list)
    group: int = 0  # the same for parts of one document
    start: int = 0  # offset in the row
    trained: int | None = None  # number of trained tokens, if there is a mask


@dataclass(frozen=True, kw_only=True)
class Item:
    """A row, a document, or a record of an input file."""

    index: int
    name: str  # "row 12"
    among: str  # "of 0–463"; empty if the number is unknown
    facts: list[str]
    parts: list[Part]

    @property
    def title(self) -> str:
        return f"{self.name} {self.among}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Show:
    """Options: how much of a part to show, and in which form."""

    tokens: bool = False  # token boundaries and ids instead of running text
    head: int | None = None  # tokens shown at the start of a long part; None: all tokens
    tail: int = 0

    def is_long(self, length: int) -> bool:
        # Hiding a few tokens would not save space.
        return self.head is not None and length > 1.4 * (self.head + self.tail)


def spans_of(
    tokens: np.ndarray, roles: np.ndarray, loss: np.ndarray, decoder: Decoder | None, show: Show
) -> list[Span]:
    """Split a part's tokens into spans; the middle of a long part is hidden."""
    count = len(tokens)
    head, tail = count, count
    if show.is_long(count):
        assert show.head is not None
        head, tail = show.head, count - show.tail
        if decoder is not None:
            head, tail = decoder.next_border(tokens, head), decoder.next_border(tokens, tail)
    spans = _split_spans(tokens[:head], roles[:head], loss[:head], decoder, show)
    if tail > head:
        spans.append(Span(f"{tail - head:,} tokens hidden", "hidden"))
        spans += _split_spans(tokens[tail:], roles[tail:], loss[tail:], decoder, show)
    return spans


def trained_runs(spans: Sequence[Span]) -> Iterator[tuple[bool, list[Span]]]:
    """Group spans into runs with and without loss; hidden spans form separate runs without loss."""
    for (is_hidden, loss), run in groupby(spans, lambda span: (span.role == "hidden", span.loss)):
        yield loss and not is_hidden, list(run)


def text_spans(text: str, show: Show, *, chars_per_token: int = 4) -> list[Span]:
    """Split text without tokens into spans."""
    if show.head is None or not show.is_long(len(text) // chars_per_token):
        return [Span(text, "text")]
    head, tail = show.head * chars_per_token, len(text) - show.tail * chars_per_token
    return [
        Span(text[:head], "text"),
        Span(f"{tail - head:,} characters hidden", "hidden"),
        Span(text[tail:], "text"),
    ]


def control_roles(tokens: np.ndarray, decoder: Decoder | None) -> np.ndarray:
    """Return indices into `ROLES` that separate control tokens from text."""
    if decoder is None:
        return np.zeros(len(tokens), dtype=np.uint8)
    return np.isin(tokens, list(decoder.special)).astype(np.uint8)


def _split_spans(
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
    """Format a token on one line, or its bytes if it is only part of a character."""
    if decoder is None:
        return ""
    data = decoder.bytes_of(token)
    try:
        return data.decode("utf-8").replace("\n", NEWLINE).replace(" ", SPACE)
    except UnicodeDecodeError:
        return raw_bytes(data)


def shown_line(parts: Sequence[str]) -> str:
    """Join facts on one line."""
    return " · ".join(one_line(part) for part in parts if part)


def choose_indices(candidates: Sequence[int], count: int, seed: int) -> list[int]:
    """Choose the first candidate and `count - 1` random others, in order."""
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
    raise ConfigError(f"`index={index}`: {there if total else f'there is no {name}'}.")


def summary_values(summary: Summary) -> dict[str, Any]:
    return {
        "path": str(summary.path),
        "kind": summary.kind,
        "headline": summary.headline,
        "facts": dict(summary.facts),
        "lengths": summary.bins,
        "lengths_of": summary.part,
        "documents": summary.num_documents,
        "sample": summary.sample,
        "notes": summary.notes,
    } | ({"lines": summary.lines} if summary.lines else {})


def item_values(item: Item) -> dict[str, Any]:
    return {"index": item.index, "facts": [fact for fact in item.facts if fact], "parts": [*map(_part, item.parts)]}


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
