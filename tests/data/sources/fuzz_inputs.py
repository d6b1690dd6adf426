"""Small valid inputs for every reader, as files by name; fuzzing.py damages them."""

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from unspool.data.sources.base import FileSource
from unspool.data.sources.hub import HfSource
from unspool.data.sources.jsonl import JsonlSource
from unspool.data.sources.mds import MdsSource
from unspool.data.sources.parquet import ParquetSource
from unspool.data.sources.repos import ReposSource
from unspool.data.sources.text import TextSource
from unspool.data.sources.textbooks import TextbooksSource

TEXTS = (
    "the old mill stands by the river",
    "naïve café, 河の水, 🦫 and all",
    'a\ttab, a "quote", a \\ and\nsecond line',
    "x" * 300,
)


@dataclass(frozen=True)
class Input:
    """Files to be written below a folder, and the source that reads them from there."""

    source: FileSource
    files: dict[str, bytes]
    links: dict[str, str] = field(default_factory=dict)  # name: target
    pipes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(map(len, self.files.values()))


# Valid inputs


def _lines(*records: object) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def _records() -> bytes:
    return _lines(*({"text": text, "id": number} for number, text in enumerate(TEXTS)))


def _chapters(subject: str, book_prefix: str = "") -> bytes:
    places = [(book, chapter) for book in (f"{book_prefix}One", f"{book_prefix}Two") for chapter in (2, "10", 1.5)]
    return _lines(
        *({"text": f"{text} {book}", "book": book, "subject": subject, "chapter": chapter}
          for (book, chapter), text in zip(places, TEXTS * 2, strict=False))
    )  # fmt: skip


def _parquet(number: int) -> bytes:
    strings = pa.array([*TEXTS, None], pa.string())
    table = pa.table({"text": strings, "number": list(range(5))})
    options: dict[str, Any] = [
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "row_group_size": 2},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_checksum": True},
        {"compression": "none", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"compression": "gzip", "data_page_size": 64, "use_dictionary": False, "write_batch_size": 1},
    ][number % 5]
    if "column_encoding" in options:
        table = table.select(["text"])
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _nested_parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"doc": [{"text": text, "lang": None} for text in TEXTS]}), sink)
    return sink.getvalue()


def _arrow(number: int) -> bytes:
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.binary()]
    texts = [text.encode() for text in TEXTS] if number % 5 == 4 else list(TEXTS)
    array = pa.array(texts, kinds[number % 5])
    batch = pa.record_batch({"text": array, "number": pa.array(range(len(TEXTS)))})
    sink = io.BytesIO()
    packing = pa.ipc.IpcWriteOptions(compression=[None, "zstd", "lz4"][number % 3])
    open_writer = pa.ipc.new_file if number % 2 else pa.ipc.new_stream
    with open_writer(sink, batch.schema, options=packing) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    return sink.getvalue()


CODE = {
    "top/setup.py": b"from setuptools import setup\nsetup()\n",
    "top/pkg/mill.py": b'def grind(corn):\n    """Grind it."""\n    return corn / 2\n',
    "top/README.md": "# Mühle\n\nA mill.\n".encode(),
    "top/data.json": b'{"a": [1, 2]}\n',
    "top/logo.png": b"\x89PNG\r\n\x1a\n\0\0",
}


def tar_bytes(
    files: dict[str, bytes], extra: tuple[tarfile.TarInfo, ...] = (), format: int = tarfile.PAX_FORMAT
) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=format) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return sink.getvalue()


def zip_bytes(files: dict[str, bytes], *, mode: int = 0) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo("x")
            info.filename = name  # past the cleaning that its constructor does
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return sink.getvalue()


def _mds(compression: str | None) -> dict[str, bytes]:
    """Three packed samples in one shard, by the public specification."""
    samples = []
    for number in range(3):
        tokens = np.arange(40 + number, dtype="<u4") + 7
        borders = np.array([[0, 10], [10, 25 + number], [25 + number, len(tokens)]], dtype="<i8")
        columns = [
            bytes([65, 2 << 2, 3, 2]) + borders.tobytes(),  # indices: int64, two dimensions of one byte each
            bytes([1 << 2, len(tokens)]) + tokens.tobytes(),  # input_ids: one dimension
        ]
        samples.append(struct.pack("<2I", *map(len, columns)) + b"".join(columns) + struct.pack("<q", len(tokens)))
    config = b'{"version": 2}'
    offsets = np.cumsum([4 * (len(samples) + 2) + len(config), *map(len, samples)])
    raw = struct.pack("<5I", len(samples), *offsets) + config + b"".join(samples)
    packed = zstandard.compress(raw) if compression else None
    entry = {
        "column_names": ["indices", "input_ids", "length"],
        "column_encodings": ["ndarray", "ndarray:uint32", "int"],
        "column_sizes": [None, None, 8],
        "compression": compression,
        "format": "mds",
        "version": 2,
        "samples": len(samples),
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}},
        "zip_data": packed and {"basename": "shard.00000.mds.zstd", "bytes": len(packed), "hashes": {}},
    }
    name, data = ("shard.00000.mds.zstd", packed) if packed else ("shard.00000.mds", raw)
    return {name: data, "index.json": json.dumps({"version": 2, "shards": [entry]}).encode()}


CARD = b"""---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*
---
# Data
"""
STATE = json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}).encode()


def _text() -> list[Input]:
    source = TextSource(kind="text", path=".")
    plain = "\n".join(TEXTS).encode()
    files = {"a.txt": plain, "b.md": b"\xef\xbb\xbf" + plain, "c.txt.gz": gzip.compress(plain, mtime=0)}
    return [Input(source, {name: data}) for name, data in {**files, "d.txt.zst": zstandard.compress(plain)}.items()]


def _jsonl(packing: str, pack: Callable[[bytes], bytes]) -> list[Input]:
    source = JsonlSource(kind="jsonl", path=".")
    return [Input(source, {f"a.jsonl{packing}": pack(data)}) for data in (_records(), _records() * 3)]


def squeeze(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def textbooks_inputs(prefix: str = "") -> list[Input]:
    """Subjects and books have the prefix before their names."""
    source = TextbooksSource(kind="textbooks", path=".")
    apart = source.model_copy(update={"subject": None, "chapter": None})
    first, second = (_chapters(f"{prefix}{subject}", prefix) for subject in ("milling", "rivers"))
    return [
        Input(source, {"a.jsonl": first}),
        Input(source, {"a.jsonl": first, "b.jsonl.gz": squeeze(second + first)}),
        Input(apart, {"a.jsonl.zst": zstandard.compress(first)}),
    ]


def _parquets() -> list[Input]:
    source = ParquetSource(kind="parquet", path=".")
    nested = Input(source.model_copy(update={"text": "doc.text"}), {"a.parquet": _nested_parquet()})
    return [nested, *(Input(source, {"a.parquet": _parquet(number)}) for number in range(5))]


def _archives(ending: str) -> list[Input]:
    source = ReposSource(kind="repos", path=".")
    if ending != "tar.gz":
        return [Input(source, {f"mill.{ending}": zip_bytes(CODE)})]
    formats = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    long_name = {**CODE, f"top/{'deep/' * 25}end.py": b"end = 1\n"}
    return [Input(source, {"mill.tar.gz": squeeze(tar_bytes(long_name, format=format))}) for format in formats]


def _folder() -> list[Input]:
    files = {name.replace("top/", "mill/"): data for name, data in CODE.items()}
    return [Input(ReposSource(kind="repos", path="."), files)]


def _hf_files() -> list[Input]:
    source = HfSource(kind="hf", path=".")
    return [
        Input(source, {"README.md": CARD, "data/train-00000-of-00001.parquet": _parquet(1)}),
        Input(source, {"train.jsonl": _records(), "test.jsonl.gz": squeeze(_records())}),
        Input(source, {"README.md": CARD, "data/part.jsonl.zst": zstandard.compress(_records())}),
    ]


def _hf_saved() -> list[Input]:
    source = HfSource(kind="hf", path=".")
    return [Input(source, {"state.json": STATE, "data-00000-of-00001.arrow": _arrow(number)}) for number in range(10)]


# By reader and packing: some inputs that are read whole.
TARGETS: dict[str, Callable[[], list[Input]]] = {
    "text": _text,
    "jsonl": lambda: _jsonl("", bytes),
    "jsonl.gz": lambda: _jsonl(".gz", squeeze),
    "jsonl.zst": lambda: _jsonl(".zst", zstandard.compress),
    "textbooks": textbooks_inputs,
    "parquet": _parquets,
    "repos tar.gz": lambda: _archives("tar.gz"),
    "repos zip": lambda: _archives("zip"),
    "repos whl": lambda: _archives("whl"),
    "repos folder": _folder,
    "mds": lambda: [Input(MdsSource(kind="mds", path="."), _mds(None))],
    "mds zstd": lambda: [Input(MdsSource(kind="mds", path="."), _mds("zstd"))],
    "hf files": _hf_files,
    "hf save_to_disk": _hf_saved,
}
