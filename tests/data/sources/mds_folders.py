"""A writer of MDS folders that follows the public specification and knows nothing of the reader."""

import bz2
import gzip
import hashlib
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from unspool.data.sources.base import Bad, Document, Item
from unspool.data.sources.mds import MdsSource

CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "float16": 18, "uint32": 32, "int32": 33}
CODES |= {"float32": 34, "uint64": 64, "int64": 65, "float64": 66}
PACK = {"zstd": zstandard.compress, "gz": gzip.compress, "bz2": bz2.compress, "br": bytes}


# A writer


def encode(encoding: str, value: Any) -> bytes:
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        dtype, _, shape = options.partition(":")
        head = b"" if dtype else bytes([CODES[value.dtype.name]])
        if not shape:
            width = next(width for width in range(4) if max(value.shape, default=0) < 1 << (8 << width))
            head += bytes([value.ndim << 2 | width]) + np.array(value.shape, dtype=f"<u{1 << width}").tobytes()
        return head + value.tobytes()
    if kind in ("int", *CODES):
        return np.array(value, dtype="int64" if kind == "int" else kind).tobytes()
    return {"str": str.encode, "bytes": bytes, "json": lambda v: json.dumps(v).encode(), "pkl": pickle.dumps}[kind](
        value
    )


def fixed_size(encoding: str) -> int | None:
    kind, _, options = encoding.partition(":")
    if kind == "ndarray" and ":" in options:
        dtype, shape = options.split(":")
        return int(np.prod([int(dim) for dim in shape.split(",")])) * np.dtype(dtype).itemsize
    return 8 if kind == "int" else np.dtype(kind).itemsize if kind in CODES else None


def sample_bytes(columns: dict[str, str], sample: dict[str, Any]) -> bytes:
    parts = [encode(columns[name], sample[name]) for name in sorted(columns)]
    varying = [
        len(part) for name, part in zip(sorted(columns), parts, strict=True) if fixed_size(columns[name]) is None
    ]
    return struct.pack(f"<{len(varying)}I", *varying) + b"".join(parts)


def shard_bytes(samples: list[bytes]) -> bytes:
    config = b'{"version": 2}'  # writers put a copy of their settings between the offsets and the samples
    first = 4 * (len(samples) + 2) + len(config)
    offsets = np.cumsum([first, *map(len, samples)])
    return struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + config + b"".join(samples)


def write(
    folder: Path,
    columns: dict[str, str],
    samples: list[dict[str, Any]],
    *,
    per_shard: int = 100,
    compression: str | None = None,
    hashes: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    shards = []
    for number, start in enumerate(range(0, len(samples), per_shard)):
        chosen = samples[start : start + per_shard]
        raw = shard_bytes([sample_bytes(columns, sample) for sample in chosen])
        files = {"raw_data": (f"shard.{number:05}.mds", raw)}
        if compression:
            method = compression.split(":")[0]
            files["zip_data"] = (f"shard.{number:05}.mds.{method}", PACK[method](raw))
        (folder / files["zip_data" if compression else "raw_data"][0]).write_bytes(
            files["zip_data" if compression else "raw_data"][1]
        )
        infos = {
            key: {"basename": name, "bytes": len(data), "hashes": {h: hashlib.new(h, data).hexdigest() for h in hashes}}
            for key, (name, data) in files.items()
        }
        shards.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": [fixed_size(columns[name]) for name in names],
                "compression": compression,
                "format": "mds",
                "hashes": list(hashes),
                "samples": len(chosen),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
                **infos,
            }
        )
    save_index(folder, shards)
    return shards


def save_index(folder: Path, shards: Any) -> None:
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


# Reading


def source(path: str = ".", **columns: str | None) -> MdsSource:
    return MdsSource(kind="mds", path=path, **columns)


def read(root: Path, path: str = ".", **columns: str | None) -> list[Item]:
    settings = source(path, **columns)
    return list(settings.read_units(settings.units(root), 0))


def tokens_of(items: list[Item]) -> list[list[int]]:
    return [item.tokens.tolist() for item in items if isinstance(item, Document) and item.tokens is not None]


def bad(items: list[Item]) -> list[tuple[str, str]]:
    return [(item.record, item.reason) for item in items if isinstance(item, Bad)]


def random_tokens(rng: np.random.Generator, longest: int = 3000) -> np.ndarray:
    return rng.integers(0, 128_256, size=int(rng.integers(1, longest))).astype(np.uint32)


UNPACKED = {"domain": "str", "input_ids": "ndarray:uint32", "length": "int"}
PACKED = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32", "length": "int"}


def unpacked(rng: np.random.Generator, num: int) -> list[dict[str, Any]]:
    rows = [random_tokens(rng) for _ in range(num)]
    return [{"domain": "book" * int(rng.integers(3)), "input_ids": row, "length": len(row)} for row in rows]
