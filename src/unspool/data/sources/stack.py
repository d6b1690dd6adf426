"""Source kind `stack`: Parquet with one code file per record, as in The Stack, grouped into repositories.

A document holds all files of one repository, from any Parquet files, in a seeded random order (as in ProLong, which
does not order by dependency). Repositories also have a seeded random order, so that `limit` takes a random sample. A
repository of more than `MAX_TEXT_BYTES` continues in a second document; no file is dropped because of its size, unless
`filter` drops it. Of two records with the same repository and path, the first is used.

A first pass sorts the input by repository on disk (spill.py), in parallel tasks that survive a kill. Then one task per
range of repositories reads it. Disk: the text, compressed by zstd. Memory per worker: about 4 × `SORT_BYTES`, or three
times the largest document if that is more.

Every Parquet record is counted once: the first file of a document as the document, further files as "joined", skipped
files by their reason. `left_out` lists skipped files by path.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from unspool.core.rng import rng_for
from unspool.data.sources.base import (
    EXPANSION,
    MAX_RECORD_BYTES,
    SAMPLE_CHARS,
    Bad,
    Document,
    Filtered,
    Item,
    TextFileSource,
    group_units,
)
from unspool.data.sources.code_filter import unwanted_content, unwanted_name
from unspool.data.sources.files import printable
from unspool.data.sources.repos import HEADER
from unspool.data.sources.spill import Spilled, SpillWriter, read_part

if TYPE_CHECKING:
    import pyarrow as pa

    from unspool.data.tokenize.encoder import Encoder

MAX_TEXT_BYTES = MAX_RECORD_BYTES
# Input bytes per task of the first pass, and text bytes per task of the second.
INPUT_BYTES = 64 << 20
PART_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Part:
    """A task of the second pass: one range of repositories."""

    folder: Path
    number: int


class StackSource(TextFileSource):
    """Parquet with one code file per record, as in The Stack; one document per repository."""

    kind: Literal["stack"]
    path: str = Field(description="A folder of Parquet files, one file, or a glob pattern.")
    repo: str = Field("max_stars_repo_name", description="Column that names the repository.")
    file: str = Field("max_stars_repo_path", description="Column that holds the file's path in the repository.")
    text: str = Field("content", description="Column that holds the file's text.")
    filter: bool = Field(
        True, description="Skip vendored, generated, minified, lock and large data files, as `kind: repos` does."
    )

    endings: ClassVar[tuple[str, ...]] = (".parquet",)
    seeded: ClassVar[bool] = True

    def spill_tasks(self, units: list[Path]) -> list[Any]:
        return group_units(units, INPUT_BYTES)

    def spill(self, task: Sequence[Path], number: int, num_parts: int, folder: Path, seed: int) -> None:
        key = rng_for(seed, "stack").bytes(32)
        bad: list[Bad] = []
        with SpillWriter(folder, number, num_parts) as writer:
            for item in self._read_files(task):
                if isinstance(item, Bad):
                    bad.append(item)
                    continue
                repo, path, data, reason = item
                group = blake2b(repo, key=key, digest_size=16).digest()
                rank = blake2b(path, key=group, digest_size=16).digest()
                writer.add(Spilled(group, rank, repo, path, b"" if reason else data, reason.encode()))
            (folder / f"bad-{number:05d}.json").write_text(json.dumps([asdict(item) for item in bad]))

    def num_parts(self, units: list[Path]) -> int:
        size = sum(unit.stat().st_size for unit in units) * EXPANSION[".parquet"]
        return int(size // PART_BYTES) + 1

    def divide_spilled(self, folder: Path, num_parts: int) -> list[Any]:
        return [Part(folder, number) for number in range(num_parts)]

    def read(self, task: Any, seed: int = 0, encoder: "Encoder | None" = None) -> Iterator[Item]:
        if not isinstance(task, Part):
            yield from self.read_units(task, seed)
            return
        if task.number == 0:
            for path in sorted(task.folder.glob("bad-*.json")):
                yield from (Bad(**item) for item in json.loads(path.read_text()))
        for _, records in groupby(read_part(task.folder, task.number), key=lambda record: record.key):
            yield from _documents(records)

    def read_units(self, units: Sequence[Path], seed: int = 0) -> Iterator[Item]:
        with tempfile.TemporaryDirectory() as name:
            self.spill(units, 0, 1, Path(name), seed)
            yield from self.read(Part(Path(name), 0), seed)

    def sample(self, units: list[Path], seed: int) -> Iterator[str]:
        for unit in units[:: max(1, len(units) // 16)]:
            chars = 0
            for item in self._read_files([unit]):
                if not isinstance(item, Bad) and not item[3]:
                    text = item[2].decode()
                    yield text[: SAMPLE_CHARS - chars]
                    chars += len(text)
                if chars >= SAMPLE_CHARS:
                    break

    def _read_files(self, units: Sequence[Path]) -> Iterator["tuple[bytes, bytes, bytes, str] | Bad"]:
        """Yield (repository, path, text, reason to skip it or "") per record."""
        from unspool.data.sources.arrow import Columns, column_path, nested_column, read_parquet

        for unit in units:

            def choose_columns(schema: "pa.Schema", unit: Path = unit) -> "Columns[Any]":
                paths = [column_path(schema, name) for name in (self.repo, self.file, self.text)]

                def files(batch: "pa.RecordBatch", number: int) -> Iterator[Any]:
                    arrays = [_as_bytes(nested_column(batch, parts)) for parts in paths]
                    for record, values in enumerate(zip(*arrays, strict=True), start=number):
                        repo, path, data = (value.as_py() for value in values)
                        if not repo or not path or data is None:
                            missing = self.repo if not repo else self.file if not path else self.text
                            yield Bad(str(unit), f"record {record}", "not_text", f"no value in column {missing!r}")
                        else:
                            data = data.removeprefix(_BOM)
                            yield repo, path, data, self._reason(path, data)

                return [".".join(parts) for parts in paths], files

            yield from read_parquet(unit, choose_columns)

    def _reason(self, path: bytes, data: bytes) -> str:
        name = path.decode("utf-8", "replace")
        if self.filter:
            return unwanted_name(name, len(data)) or unwanted_content(name, data) or ""
        if len(data) > MAX_RECORD_BYTES:
            return "too_long"
        reason = unwanted_content(name, data)
        return reason if reason in ("binary", "empty") else ""


def _as_bytes(array: "pa.Array") -> "pa.Array":
    import pyarrow as pa

    return (array.dictionary_decode() if pa.types.is_dictionary(array.type) else array).cast(pa.large_binary())


def _documents(records: Iterator[Spilled]) -> Iterator[Item]:
    """Yield the documents of each repository: one, or several if it exceeds the maximum length of a document."""
    text = bytearray()
    left_out: list[tuple[str, str]] = []
    number, previous, name = 1, None, ""
    for record in records:
        name = name or printable(record.group.decode("utf-8", "replace"))
        path = printable(record.name.decode("utf-8", "replace"))
        reason = "duplicate" if record.name == previous else record.note.decode()
        previous = record.name
        if reason:
            left_out.append((path, reason))
            yield Filtered(f"{name}:{path}", reason)
            continue
        header = HEADER.format(path=path).encode()
        if text and len(text) + len(header) + len(record.data) + 2 > MAX_TEXT_BYTES:
            yield Document(f"{name}:{number}", text.decode(), left_out=tuple(left_out))
            text, left_out, number = bytearray(), [], number + 1
        elif text:
            yield Filtered(f"{name}:{path}", "joined")
            text += b"\n"
        text += header + record.data
        text += b"" if record.data.endswith(b"\n") else b"\n"
    if text:
        yield Document(f"{name}:{number}", text.decode(), left_out=tuple(left_out))
