"""The text to measure attention on: documents in order, or in shuffled pieces, or a packed row.

The same files, settings and seed give the same tokens. With a given length, the text has exactly that many tokens,
shared among documents as equally as their lengths allow.
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
from unspool.inspection.run_paths import find_data
from unspool.inspection.utk_chunks import documents_of

# No tokenizer averages this many characters per token, so text beyond this is not tokenized.
_MAX_CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True, kw_only=True)
class Text:
    tokens: np.ndarray  # uint32[S]
    piece_lens: tuple[int, ...]  # sums to S
    chunk_ids: tuple[int, ...]  # document of each piece, numbered from 0 in order of appearance
    doc_names: tuple[str, ...]
    origin: str  # shown description
    attention: str = "full"  # default attention of this text
    notes: list[str] = field(default_factory=list)

    @property
    def piece_names(self) -> list[str]:
        """Return names such as `2` for a whole document and `2b` for its second piece."""
        seen: dict[int, int] = {}
        names = []
        for doc in self.chunk_ids:
            part = seen[doc] = seen.get(doc, 0) + 1
            several = self.chunk_ids.count(doc) > 1
            letter = string.ascii_lowercase[(part - 1) % 26] if several else ""
            names.append(f"{doc + 1}{letter}")
        return names


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How to make a text from files."""

    num_docs: int | None = None  # None: 4, or one of each file
    length: int | None = None
    pieces: int = 1  # of each document, shuffled
    seed: int = 0


def read_files(files: Sequence[Path], encoder: Encoder, cut: TextSettings) -> Text:
    """Read documents from the files in turn."""
    most = cut.num_docs or max(4, len(files))
    found = list(islice((doc for turn in zip_longest(*map(_documents, files)) for doc in turn if doc), most))
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: no text found; give a file with at least one document.")
    if cut.length is not None:
        found = [Document(doc.id, doc.text[: _MAX_CHARACTERS_PER_TOKEN * cut.length]) for doc in found]
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
    """Truncate documents to `length` tokens in total; long documents use the tokens that short ones do not need."""
    there = sum(map(len, docs))
    if there < length:
        raise ConfigError(
            f"`length={format_size(length)!r}`: the text has only {there:,} tokens; give more text, raise `docs`, or "
            "omit `length`."
        )
    if length < len(docs):
        raise ConfigError(
            f"`length` {format_size(length)} is less than one token for each of {len(docs)} documents; raise it."
        )
    lens = [0] * len(docs)
    left = length
    by_size = sorted(range(len(docs)), key=lambda number: len(docs[number]))
    for done, number in enumerate(by_size):
        lens[number] = min(len(docs[number]), left // (len(docs) - done))
        left -= lens[number]
    return [doc[:keep] for doc, keep in zip(docs, lens, strict=True)]


def shuffle_pieces(docs: Sequence[np.ndarray], count: int, seed: int) -> list[tuple[int, np.ndarray]]:
    """Cut each document into `count` random pieces and shuffle all; former neighbors that meet are joined again."""
    rng = rng_for(seed, "look", "attention")
    pieces: list[tuple[int, int, int]] = []
    for number, doc in enumerate(docs):
        if len(doc) < count:
            raise ConfigError(f"`pieces={count}`: a document has only {len(doc)} tokens; use fewer pieces.")
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
        raise ConfigError(f"`row='{rows.path}:{index}'`: the dataset has {len(rows):,} rows, numbered from 0.")
    row = rows.row(index)
    if row.positions is not None:
        raise ConfigError(
            f"`row='{rows.path}:{index}'`: its position ids skip values (PoSE), so distances are not real; "
            "use a row of a dataset without pose."
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
    """Yield the readable documents of one file."""
    place = find_data(path)
    if place.kind != "records" or path.is_dir():
        raise ConfigError(f"`text={str(path)!r}`: give a file such as book.txt or books.jsonl; use `row` for rows.")
    for item in read_items(source_for_file(path), [path]):
        if isinstance(item, Bad):
            raise DataError(f"{path}, {item.record}: {item.detail}.")
        if isinstance(item, Document) and item.text.strip():
            yield item
