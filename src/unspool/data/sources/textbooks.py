"""Textbooks: chapters joined to books, and the books of one subject to one document.

In: JSON lines (plain, .gz or .zst), one chapter per record. Out: one `Document` per subject (or per book), its books
in a seeded random order, each under its title, the chapters in the order of their numbers.
Promise: every record is counted once. A document carries the id of the chapter it begins with; the others are
Filtered "joined", a blank chapter is Filtered "empty", one that cannot be read is Bad.
Price: the files are read twice, first for where each subject ends, so that only subjects that have begun and not
ended are in memory: one, if the input is sorted by subject, and all of them if it is shuffled.
Limit: chapters are only joined within one call of `read`, so all files of a source belong into one call.
Elsewhere: lines and JSON (files.py, jsonl.py).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unspool.core.rng import rng_for
from unspool.data.sources.base import Bad, Document, Filtered, Item
from unspool.data.sources.config import TextbooksSource
from unspool.data.sources.files import checked_text, find_files
from unspool.data.sources.jsonl import ENDINGS, records, text_field

_Order = tuple[tuple[int, float, str], ...]


@dataclass(frozen=True, slots=True)
class _Chapter:
    id: str
    place: tuple[int, int]  # file and line
    group: str  # the subject, or the book where books stay apart
    book: str
    order: _Order | None  # None: the record does not say
    text: str


def units(source: TextbooksSource, root: Path) -> list[Path]:
    return find_files(source.path, root, kind="textbooks", endings=ENDINGS)


def read(source: TextbooksSource, units: Sequence[Path], seed: int) -> Iterator[Item]:
    last = {item.group: item.place for item in _records(source, units) if isinstance(item, _Chapter)}
    begun: dict[str, list[_Chapter]] = {}
    for item in _records(source, units):
        if not isinstance(item, _Chapter):
            yield item
            continue
        begun.setdefault(item.group, []).append(item)
        if item.place == last.get(item.group):
            yield from _join(item.group, begun.pop(item.group), seed)
    for group, chapters in begun.items():  # only if the files have changed meanwhile
        yield from _join(group, chapters, seed)


def _join(group: str, chapters: list[_Chapter], seed: int) -> Iterator[Item]:
    books: dict[str, list[_Chapter]] = {}
    for chapter in chapters:
        books.setdefault(chapter.book, []).append(chapter)
    titles = sorted(books)
    order = rng_for(seed, "textbooks", group).permutation(len(titles))
    parts: list[str] = []
    joined: list[_Chapter] = []
    for title in (titles[index] for index in order):
        ordered = _in_order(books[title])
        parts += [f"# {' '.join(title.split())}", *(chapter.text.strip("\n") for chapter in ordered)]
        joined += ordered
    # The document comes last: whoever stops after it has counted all of its chapters.
    yield from (Filtered(chapter.id, "joined") for chapter in joined[1:])
    yield Document(joined[0].id, "\n\n".join(parts) + "\n")


def _in_order(chapters: list[_Chapter]) -> list[_Chapter]:
    """By chapter, where all say which they are; else as they came."""
    numbered = [(chapter.order, chapter.place, chapter) for chapter in chapters if chapter.order is not None]
    if len(numbered) < len(chapters):
        return chapters
    return [chapter for _, _, chapter in sorted(numbered, key=lambda entry: entry[:2])]


def _records(source: TextbooksSource, units: Sequence[Path]) -> Iterator[_Chapter | Bad | Filtered]:
    for index, path in enumerate(units):
        for found in records(path, partial(_chapter, source, path.name, index)):
            if isinstance(found, _Chapter) and not found.text.strip():
                yield Filtered(found.id, "empty")
            else:
                yield found


def _chapter(source: TextbooksSource, name: str, index: int, number: int, record: dict[str, object]) -> _Chapter:
    text = checked_text(text_field(record, source.text))
    book = checked_text(text_field(record, source.book))
    group = book if source.subject is None else checked_text(text_field(record, source.subject))
    order = None if source.chapter is None else _natural(record.get(source.chapter))
    return _Chapter(f"{name}:{number}", (index, number), group, book, order, text)


def _natural(chapter: object) -> _Order | None:
    """A key under which "2" comes before "10", also in "Chapter 2"; None if there is nothing to sort by."""
    if isinstance(chapter, bool) or not isinstance(chapter, int | float | str):
        return None
    if isinstance(chapter, str):
        # Digits in portions: a number of thousands of them could not be converted.
        pieces = re.findall(r"[0-9]{1,15}|[^0-9]+", chapter.strip().casefold())
        return tuple((0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces) or None
    # A whole number may be too large for isnan.
    return None if isinstance(chapter, float) and math.isnan(chapter) else ((0, chapter, ""),)
