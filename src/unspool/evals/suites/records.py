"""Records of user-provided datasets, and their questions and passages."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unspool.core.errors import ConfigError, DataError
from unspool.data.sources.base import Bad
from unspool.data.sources.files import Unreadable, chunks
from unspool.data.sources.hub import HfSource
from unspool.data.sources.jsonl import read_jsonl

Record = Mapping[str, Any]
_HUB = "hub:"


class Passage(NamedTuple):
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question with its known data."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Passage, ...] = ()
    others: tuple[Passage, ...] = ()  # passages of its record without the answer
    grades: tuple[int, ...] = ()  # relevance grades of `gold`, if known
    released: tuple[Passage, ...] = ()  # the whole released context, in order
    extra: Record = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UserData:
    """What a suite expects in the user's file `paths.data`, for error messages."""

    suite: str
    source: str  # where the file comes from
    fields: tuple[str, ...]
    more: str  # meaning of fields

    def check_paths(self, paths: Mapping[str, str]) -> None:
        """Raise ValueError if `data` is missing or if there are other paths."""
        if set(paths) != {"data"}:
            raise ValueError(
                f"paths needs one entry, data: a JSON, JSONL or Parquet file with the fields {', '.join(self.fields)}; "
                f"use {self.source}"
            )

    def check(self, records: list[Record], path: str) -> list[Record]:
        """Return the records. Raises DataError for the first record without one of the fields."""
        for record in records:
            missing = [name for name in self.fields if record.get(name) in (None, "")]
            if missing:
                raise self.error(path, record, f"no {' and no '.join(missing)}")
        return records

    def error(self, path: str, record: Record, problem: str) -> DataError:
        return DataError(
            f"{self.suite}: {path}, record {record.get('_line')}: {problem}. Expected fields: "
            f"{', '.join(self.fields)}; {self.more}. Use {self.source}."
        )


def read_records(path: str, *, split: str = "validation") -> list[Record]:
    """Read all records of a file, or of a Hub dataset written as hub:ORG/NAME or hub:ORG/NAME@CONFIG.

    A JSON file is a list, or an object with a list in `data` or `demos`. Every record gets its number as `_line`, for
    error messages. Raises DataError if the file cannot be read or is empty.
    """
    if path.startswith(_HUB):
        name, _, config = path.removeprefix(_HUB).partition("@")
        options = {"kind": "hf", "path": name, "split": split} | ({"config": config} if config else {})
        files = list(HfSource.model_validate(options).local_files(Path()))
    else:
        files = [Path(path).expanduser()]
        if not files[0].is_file():
            raise ConfigError(f"{path}: file not found; use a JSON, JSONL or Parquet file, or hub:ORG/NAME.")
    found = [record for file in files for record in _read_file(file)]
    if not found:
        raise DataError(f"{path}: no records; expected one JSON object per line.")
    return found


def _read_file(file: Path) -> Iterator[Record]:
    if file.name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
        yield from _number(_json_rows(file))
    elif file.suffix == ".parquet":
        yield from _number(_parquet_rows(file))
    else:
        for record in read_jsonl(file, lambda number, record: {**record, "_line": number}):
            if isinstance(record, Bad):
                raise DataError(f"{file}, {record.record}: {record.detail}.")
            yield record


def _json_rows(file: Path) -> list[Any]:
    try:
        loaded = json.loads(b"".join(chunks(file)))
    except (ValueError, OSError, Unreadable) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error}); correct the file.") from error
    rows = loaded.get("data", loaded.get("demos")) if isinstance(loaded, dict) else loaded
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file}: expected a list of records, or an object with such a list in `data` or `demos`.")
    return rows


def _parquet_rows(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet  # import late: it loads slowly, and few users have Parquet files

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({error}); replace the file.") from error
    return rows


def _number(rows: list[dict[str, Any]]) -> Iterator[Record]:
    return ({**row, "_line": number} for number, row in enumerate(rows, start=1))


def first_field(record: Record, names: tuple[str, ...], path: str) -> Any:
    """Return the first of these fields that is present and not empty. Raises DataError if there is none."""
    for name in names:
        if record.get(name) not in (None, "", []):
            return record[name]
    present = ", ".join(key for key in record if key != "_line")
    raise DataError(f"{path}, record {record.get('_line')}: none of the fields {', '.join(names)}; it has {present}.")


def flatten(value: Any) -> tuple[str, ...]:
    """Return the distinct strings of a string, a list of strings, or a list of lists of strings."""
    if isinstance(value, (list, tuple)):
        return tuple(dict.fromkeys(text for part in value for text in flatten(part)))
    return (str(value),)
