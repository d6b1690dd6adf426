"""Read documents from text, JSONL and Parquet files.

In: a source of the recipe and the folder its relative paths start from. Out: `Document`s, files in
sorted order, records in file order.
Promise: a file that is missing, cut short or not what it should be stops the run with its name and
the record; nothing is skipped in silence.
Elsewhere: tokenising (tokens.py), the shards and their order of work (corpus.py).
"""

import glob
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from unspool.base.errors import ConfigError, DataError
from unspool.data.sources import NOT_READ_YET, JsonlSource, ParquetSource, RecallSource, Source, TextSource

FileSource = TextSource | JsonlSource | ParquetSource

# What a folder is searched for; a text source takes every file that is not hidden.
_ENDINGS = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",), "text": ("",)}
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    id: str  # "<file name>:<record number>", counted from 1 as editors count lines
    text: str


def file_source(source: Source) -> FileSource:
    """What is read from disk for a source: itself, or the prose that generated documents are built on."""
    if isinstance(source, TextSource | JsonlSource | ParquetSource):
        return source
    if isinstance(source, RecallSource):
        if ".jsonl" in Path(source.prose).name:
            return JsonlSource.model_validate({"kind": "jsonl", "path": source.prose})
        return TextSource.model_validate({"kind": "text", "path": source.prose})
    raise ConfigError(f"sources of kind {source.kind} cannot be read yet. {NOT_READ_YET[source.kind]}")


def source_files(source: Source, root: Path) -> list[Path]:
    """The files of a source, sorted; ConfigError if there are none."""
    files = file_source(source)
    path = root / Path(files.path).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [file for file in path.rglob("*") if not _hidden(file.relative_to(path))]
        found = [file for file in found if file.name.endswith(_ENDINGS[files.kind]) and file.is_file()]
        if not found:
            wanted = " or ".join(_ENDINGS[files.kind]) if files.kind != "text" else "plain text"
            raise ConfigError(
                f"folder {path} holds no {wanted} files; a source of kind {files.kind} needs at least one."
            )
        return sorted(found)
    # glob.glob and not Path.glob, which refuses absolute patterns.
    matches = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())  # noqa: PTH207
    if matches:
        return matches
    what = "matches no file" if glob.has_magic(str(path)) else "does not exist"
    raise ConfigError(f"path {files.path!r} {what} (looked for {path}); give a file, a folder or a pattern.")


def read_documents(source: Source, root: Path) -> Iterator[Document]:
    files = file_source(source)
    return read_files(files, source_files(files, root))


def read_files(source: FileSource, paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        if isinstance(source, TextSource):
            yield Document(f"{path.name}:1", _decode(b"".join(_chunks(path)), f"{path}"))
        elif isinstance(source, JsonlSource):
            yield from _read_jsonl(path, source.text)
        else:
            yield from _read_parquet(path, source.text)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(_chunks(path)), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(_decode(line, where))
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}).") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: a JSON object was expected, not {type(record).__name__}.")
        yield Document(f"{path.name}:{number}", _text_of(record, field, where))


def _text_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'no fields'}.")
    text = record[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} must be a string, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is not a character and cannot be tokenised.
        raise DataError(f"{where}: field {field!r} has half a surrogate pair at character {error.start}.") from error
    return text


def _read_parquet(path: Path, column: str) -> Iterator[Document]:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({_first_line(error)}).") from error
    names = file.schema_arrow.names
    if column not in names:
        raise DataError(f"{path}: no column {column!r}; it has {', '.join(map(repr, names))}.")
    kind = file.schema_arrow.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(f"{path}: column {column!r} must hold strings, not {kind}.")
    number = 0
    batches = file.iter_batches(batch_size=256, columns=[column])
    while True:
        try:
            texts = next(batches).column(0).to_pylist()
        except StopIteration:
            return
        except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as error:
            raise DataError(f"{path}, after record {number}: unreadable ({_first_line(error)}).") from error
        for text in texts:
            number += 1
            if text is None:
                raise DataError(f"{path}, record {number}: column {column!r} is null; a string is needed.")
            yield Document(f"{path.name}:{number}", text)


def _chunks(path: Path) -> Iterator[bytes]:
    """The file's content, decompressed by its ending."""
    try:
        if path.suffix == ".zst":
            yield from _zstd_chunks(path)
        else:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
    except FileNotFoundError as error:
        raise DataError(f"{path}: the file has gone.") from error
    except EOFError as error:
        raise DataError(f"{path}: cut short; the compressed file has no end.") from error
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path}: cannot be read ({_first_line(error)}).") from error


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    # zstandard's stream_reader takes a cut-off file for a finished one; a decompressobj knows whether
    # its frame ended.
    frame = None
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    begun: list[bytes] = []  # the parts of a line that spans chunks; joined once, however long it is
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            yield from others[:-1]
            begun = [others[-1]]
    if any(begun):
        yield b"".join(begun)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start}; convert the file to UTF-8.") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
