"""Datasets in the layouts of `save_to_disk` and the Hub, and the expected records."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from unspool.data.sources.base import Bad, Document, Item
from unspool.data.sources.hub import HfSource


def source(path: str = ".", **settings: Any) -> HfSource:
    return HfSource(kind="hf", path=path, **settings)


def write(path: Path, *texts: str) -> None:
    """Write a data file in the format of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    elif path.suffix == ".arrow":
        write_stream(path, [pa.record_batch({"text": pa.array(texts, type=pa.string())})])
    else:
        data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(data))


def write_stream(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def save_to_disk(folder: Path, texts: Sequence[str], *, split: str | None = None, num_files: int = 1) -> None:
    """What `datasets` writes: Arrow streams and two JSON files that describe them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{number:05}-of-{num_files:05}.arrow" for number in range(num_files)]
    for name, chosen in zip(names, np.array_split(np.array(texts, dtype=object), num_files), strict=True):
        write(folder / name, *chosen)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def card(folder: Path, configs: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"---\nlicense: mit\n{configs}\n---\n# A dataset\n\n---\nnot: yaml\n---\n")


def names(root: Path, settings: HfSource) -> list[str]:
    return [path.relative_to((root / settings.path).resolve()).as_posix() for path in settings.units(root.resolve())]


def read(root: Path, settings: HfSource) -> list[Item]:
    return list(settings.read_units(settings.units(root), 0))


def texts_of(items: list[Item]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


def bad(items: list[Item]) -> list[tuple[str, str]]:
    return [(item.record, item.reason) for item in items if isinstance(item, Bad)]
