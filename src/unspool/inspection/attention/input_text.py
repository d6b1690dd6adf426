"""The text that attention is looked at on: documents one after the other, or in shuffled pieces, or a row.

In: input files and an encoder, or an opened rows set. Out: `Text`.
Promise: the same files, settings and seed give the same tokens; where a length is asked for, the text has exactly
that many tokens, to which documents contribute as equally as their lengths allow.
Elsewhere: what a model does with it (attention_watch.py).
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from unspool.core.errors import ConfigError, DataError
from unspool.core.rng import rng_for
from unspool.core.sizes import format_size
from unspool.data.sources.base import Bad, Document, read_items
from unspool.data.sources.registry import source_for_file
from unspool.data.tokenize.encoder import Encoder
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import find_place
from unspool.inspection.utk_chunks import documents_of

# No tokenizer has tokens of so many characters on average, so that what is behind them need not be tokenised.
_MOST_CHARACTERS = 64


@dataclass(frozen=True, kw_only=True)
class Text:
    tokens: np.ndarray  # uint32[S]
    piece_lens: tuple[int, ...]  # sums to S
    chunk_ids: tuple[int, ...]  # the document of each piece, counted from 0 as they first appear
    doc_names: tuple[str, ...]
    origin: str  # for people
    attention: str = "full"  # what is usual for it
    notes: list[str] = field(default_factory=list)

    @property
    def piece_names(self) -> list[str]:
        """`2` for a whole document, `2b` for the second of its pieces that is met."""
        seen: dict[int, int] = {}
        names = []
        for doc in self.chunk_ids:
            part = seen[doc] = seen.get(doc, 0) + 1
            several = self.chunk_ids.count(doc) > 1
            letter = string.ascii_lowercase[(part - 1) % 26] if several else ""
            names.append(f"{doc + 1}{letter}")
        return names


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How files become a text."""

    num_docs: int | None = None  # 4, or one of each file, if None
    length: int | None = None
    pieces: int = 1  # of each document, shuffled
    seed: int = 0


def read_files(files: Sequence[Path], encoder: Encoder, cut: Cut) -> Text:
    """Documents of several files in turn."""
    most = cut.num_docs or max(4, len(files))
    found = list(islice((doc for turn in zip_longest(*map(_documents, files)) for doc in turn if doc), most))
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: holds no text; give a file with at least one document.")
    if cut.length is not None:
        found = [Document(doc.id, doc.text[: _MOST_CHARACTERS * cut.length]) for doc in found]
    docs = encoder.encode([doc.text for doc in found])
    if cut.length is not None:
        docs = share_length(docs, cut.length)
    pieces = list(enumerate(docs)) if cut.pieces == 1 else shuffle_pieces(docs, cut.pieces, cut.seed)
    return Text(
        tokens=np.concatenate([tokens for _, tokens in pieces]),
        piece_lens=tuple(len(tokens) for _, tokens in pieces),
        chunk_ids=tuple(documents_of(np.array([doc for doc, _ in pieces]))),
        doc_names=tuple(found[doc].id for doc in dict.fromkeys(doc for doc, _ in pieces)),
        origin=", ".join(file.name for file in files),
    )


def share_length(docs: Sequence[np.ndarray], length: int) -> list[np.ndarray]:
    """Cut documents so that they have `length` tokens together; what short ones leave, longer ones take."""
    there = sum(map(len, docs))
    if there < length:
        raise ConfigError(
            f"--length {format_size(length)}: the text has {there:,} tokens; give more text, more --docs, or leave "
            "--length out."
        )
    if length < len(docs):
        raise ConfigError(f"--length {format_size(length)} is less than a token for each of {len(docs)} documents.")
    lens = [0] * len(docs)
    left = length
    by_size = sorted(range(len(docs)), key=lambda number: len(docs[number]))
    for done, number in enumerate(by_size):
        lens[number] = min(len(docs[number]), left // (len(docs) - done))
        left -= lens[number]
    return [doc[:keep] for doc, keep in zip(docs, lens, strict=True)]


def shuffle_pieces(docs: Sequence[np.ndarray], count: int, seed: int) -> list[tuple[int, np.ndarray]]:
    """Each document in `count` pieces, cut and shuffled by chance; neighbours that fit together are one again."""
    rng = rng_for(seed, "look", "attention")
    pieces: list[tuple[int, int, int]] = []
    for number, doc in enumerate(docs):
        if len(doc) < count:
            raise ConfigError(f"--pieces {count}: a document of {len(doc)} tokens has not so many; use fewer.")
        places = np.sort(rng.choice(len(doc) - 1, size=count - 1, replace=False) + 1).tolist()
        pieces += [(number, start, stop) for start, stop in zip([0, *places], [*places, len(doc)], strict=True)]
    joined: list[tuple[int, int, int]] = []
    for place in rng.permutation(len(pieces)).tolist():
        number, start, stop = pieces[place]
        if joined and joined[-1][0] == number and joined[-1][2] == start:
            joined[-1] = (number, joined[-1][1], stop)
        else:
            joined.append((number, start, stop))
    return [(number, docs[number][start:stop]) for number, start, stop in joined]


def read_row(rows: Rows, index: int, notes: Sequence[str]) -> Text:
    if not 0 <= index < len(rows):
        raise ConfigError(f"--row {rows.path}:{index}: there are {len(rows):,} rows, counted from 0.")
    row = rows.row(index)
    if row.positions is not None:
        raise ConfigError(
            f"--row {rows.path}:{index}: its positions skip some, so that distances in it are pretended; "
            "use a row without pose."
        )
    docs = range(len(row.doc_lens)) if row.chunk_ids is None else documents_of(row.chunk_ids)
    return Text(
        tokens=np.array(row.tokens),
        piece_lens=tuple(row.doc_lens.tolist()),
        chunk_ids=tuple(docs),
        doc_names=tuple(f"document {number + 1} of the row" for number in range(max(docs) + 1)),
        origin=f"row {index} of {rows.path}",
        attention=row.attention,
        notes=list(notes),
    )


def _documents(path: Path) -> Iterator[Document]:
    """The readable documents of one file."""
    place = find_place(path)
    if place.kind != "records" or path.is_dir():
        raise ConfigError(f"--text {path}: give a file such as book.txt or books.jsonl; rows are looked at with --row.")
    for item in read_items(source_for_file(path), [path]):
        if isinstance(item, Bad):
            raise DataError(f"{path}, {item.record}: {item.detail}.")
        if isinstance(item, Document) and item.text.strip():
            yield item
