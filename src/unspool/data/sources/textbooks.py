"""Source kind `textbooks`: join chapters into books, and the books of a subject into one document.

The input is JSON lines (plain, .gz or .zst) or Parquet, one chapter per record. A document holds the books of a subject
(or one book) in a seeded random order, each under its title, with chapters ordered by number. Every record is counted
once: the document has the id of its first chapter, the others are Filtered "joined", and a blank chapter is Filtered
"empty".

The files are read twice: first to find the end of each subject, so that only unfinished subjects are in memory. If the
input is sorted by subject, that is one subject; if it is shuffled, all of them. Chapters are joined only within one
call of `read`.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unspool.core.rng import rng_for
from unspool.data.sources.base import Bad, Document, Filtered, Item, TextFileSource
from unspool.data.sources.files import Unreadable, checked_text
from unspool.data.sources.jsonl import ENDINGS, read_jsonl, text_field

if TYPE_CHECKING:
    import pyarrow as pa

_Order = tuple[tuple[int, float, str], ...]


@dataclass(frozen=True, slots=True)
class _Chapter:
    id: str
    place: tuple[int, int]  # file and line
    group: str  # the subject, or the book if books are separate documents
    book: str
    order: _Order | None  # None if the record has no chapter number
    text: str


class TextbooksSource(TextFileSource):
    """Chapters (one JSONL or Parquet record each) joined to books, and the books of one subject to one document."""

    kind: Literal["textbooks"]
    text: str = Field("text", description="Field that holds a chapter's text.")
    book: str = Field("book", description="Field that names the book.")
    subject: str | None = Field(
        "subject",
        description="Field that names the subject. `FIELD/N` takes folder N (from 0) of a path in that field; `null` "
        "makes one document per book.",
    )
    chapter: str | None = Field(
        "chapter", description="Field by which chapters are sorted. `null` keeps the order of the file."
    )

    endings: ClassVar[tuple[str, ...]] = (*ENDINGS, ".parquet")
    seeded: ClassVar[bool] = True

    def divide(self, units: list[Path], seed: int) -> list[list[Path]]:
        return [units]  # the chapters of one book may be in several files

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        last = {item.group: item.place for item in self._read_chapters(units) if isinstance(item, _Chapter)}
        begun: dict[str, list[_Chapter]] = {}
        for item in self._read_chapters(units):
            if not isinstance(item, _Chapter):
                yield item
                continue
            begun.setdefault(item.group, []).append(item)
            if item.place == last.get(item.group):
                yield from _join(item.group, begun.pop(item.group), seed)
        for group, chapters in begun.items():  # only if the files changed between the two passes
            yield from _join(group, chapters, seed)

    def _read_chapters(self, units: Sequence[Path]) -> Iterator[_Chapter | Bad | Filtered]:
        for index, path in enumerate(units):
            chapter = partial(self._chapter, path.name, index)
            records = self._read_parquet(path, chapter) if path.suffix == ".parquet" else read_jsonl(path, chapter)
            for found in records:
                yield Filtered(found.id, "empty") if isinstance(found, _Chapter) and not found.text.strip() else found

    def _read_parquet(
        self, path: Path, chapter: Callable[[int, dict[str, object]], _Chapter]
    ) -> Iterator[_Chapter | Bad]:
        from unspool.data.sources.arrow import Columns, read_parquet  # pyarrow takes long to import

        def choose_columns(schema: "pa.Schema") -> "Columns[_Chapter | Bad]":
            wanted = {self.text, self.book, self.chapter, self.subject, (self.subject or "").rpartition("/")[0]}
            return [name for name in schema.names if name in wanted], chapters

        def chapters(batch: "pa.RecordBatch", number: int) -> Iterator[_Chapter | Bad]:
            for offset in range(batch.num_rows):
                try:
                    # One by one: Arrow does not check strings in files, and one bad string must not cost the other
                    # records.
                    yield chapter(number + offset, batch.slice(offset, 1).to_pylist()[0])
                except Unreadable as error:
                    yield Bad(str(path), f"record {number + offset}", error.reason, error.detail)
                except UnicodeDecodeError as error:
                    detail = f"not valid UTF-8 at byte {error.start}"
                    yield Bad(str(path), f"record {number + offset}", "invalid_utf8", detail)

        return read_parquet(path, choose_columns)

    def _chapter(self, name: str, index: int, number: int, record: dict[str, object]) -> _Chapter:
        text = checked_text(text_field(record, self.text))
        book = checked_text(text_field(record, self.book))
        group = book if self.subject is None else checked_text(_subject(record, self.subject))
        order = None if self.chapter is None else _natural_key(record.get(self.chapter))
        return _Chapter(f"{name}:{number}", (index, number), group, book, order, text)


def _subject(record: dict[str, object], field: str) -> str:
    """Return the text of a field, or a folder of the path in it."""
    name, _, number = field.rpartition("/")
    if field in record or not name or not number.isdecimal():
        return text_field(record, field)
    folders = text_field(record, name).strip("/").split("/")
    if int(number) >= len(folders):
        raise Unreadable("missing_field", f"field {name!r} has no folder {number}: {'/'.join(folders)[:80]!r}")
    return folders[int(number)]


def _join(group: str, chapters: list[_Chapter], seed: int) -> Iterator[Item]:
    books: dict[str, list[_Chapter]] = {}
    for chapter in chapters:
        books.setdefault(chapter.book, []).append(chapter)
    titles = sorted(books)
    order = rng_for(seed, "textbooks", group).permutation(len(titles))
    parts: list[str] = []
    joined: list[_Chapter] = []
    for title in (titles[index] for index in order):
        ordered = _sort_chapters(books[title])
        parts += [f"# {' '.join(title.split())}", *(chapter.text.strip("\n") for chapter in ordered)]
        joined += ordered
    # The document comes last, so that its chapters are counted even if reading stops after it.
    yield from (Filtered(chapter.id, "joined") for chapter in joined[1:])
    yield Document(joined[0].id, "\n\n".join(parts) + "\n")


def _sort_chapters(chapters: list[_Chapter]) -> list[_Chapter]:
    """Sort by chapter number if all have one; otherwise keep the input order."""
    numbered = [(chapter.order, chapter.place, chapter) for chapter in chapters if chapter.order is not None]
    if len(numbered) < len(chapters):
        return chapters
    return [chapter for _, _, chapter in sorted(numbered, key=lambda entry: entry[:2])]


def _natural_key(chapter: object) -> _Order | None:
    """Return a sort key that puts "2" before "10", also in "Chapter 2"; None if there is no key."""
    if isinstance(chapter, bool) or not isinstance(chapter, int | float | str):
        return None
    if isinstance(chapter, str):
        # At most 15 digits at a time, because int() rejects numbers of thousands of digits.
        pieces = re.findall(r"[0-9]{1,15}|[^0-9]+", chapter.strip().casefold())
        return tuple((0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in pieces) or None
    # A whole number may be too large for isnan.
    return None if isinstance(chapter, float) and math.isnan(chapter) else ((0, chapter, ""),)
