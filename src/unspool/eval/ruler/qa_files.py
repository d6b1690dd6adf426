"""The records of a file of questions, whatever it is packed in.

In: a path to .json, .jsonl or .parquet, plain or packed as .gz or .zst, or hub:ORG/NAME[@CONFIG]. Out: dicts.
Promise: an unreadable file is a DataError that names it.
"""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import zstandard

from unspool.base.errors import ConfigError, DataError
from unspool.data.readers import source_units
from unspool.data.sources import HfSource

_HUB = "hub:"


def records(path: str, *, default_split: str) -> Iterator[dict[str, Any]]:
    if path.startswith(_HUB):
        name, _, config = path.removeprefix(_HUB).partition("@")
        options = {"kind": "hf", "path": name, "split": default_split} | ({"config": config} if config else {})
        for file in source_units(HfSource.model_validate(options), Path()):
            yield from _read(file)
        return
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigError(f"ruler: {path} is no file; give a JSON, JSONL or Parquet file, or hub:ORG/NAME.")
    yield from _read(found)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if path.suffix == ".parquet":
            rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
            yield from rows
            return
        text = _text(path)
        if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
            whole = json.loads(text)
            yield from whole["data"] if isinstance(whole, dict) and "data" in whole else whole
            return
        yield from (json.loads(line) for line in text.split("\n") if line.strip())
    except (OSError, ValueError, TypeError, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise DataError(f"ruler: {path} cannot be read ({error}); give JSON, JSONL or Parquet.") from error


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    elif path.suffix == ".zst":
        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)).read()
    return raw.decode("utf-8")
