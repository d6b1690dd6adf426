"""Write packed rows for other libraries: Arrow and Parquet (`datasets`), MDS (`streaming`), Megatron's .bin and .idx.

Each format holds what its readers can use. Arrow and Parquet have the columns of `row_columns`. MDS has those of
ProLong's data: `indices` and `mask`. `indices` has the [start, end) of each span that attends only to itself. `mask` is
0 for a token that is not a prediction target. Megatron's files hold tokens and two levels of boundaries: a Megatron
document is a row, and a Megatron sequence is a document. A warning lists what a format omits.
"""

import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unspool.core.artifacts import read_manifest, remove, write_atomic
from unspool.core.config import lookup
from unspool.core.errors import ConfigError, naming
from unspool.data.packing.row import BATCH_TOKENS, IGNORE, Row, attended_lens, labels, position_ids
from unspool.data.packing.store import RowSet, open_rows

logger = logging.getLogger(__name__)

# Records which rows a folder holds. Hidden, since some readers take every other file of a folder for data.
MARK = ".unspool.json"
MDS_SHARD_BYTES = 1 << 26
MEGATRON_HEADER = b"MMIDIDX\x00\x00"
# Megatron's codes of its two token types.
_UINT16, _INT32 = 8, 4
_UINT16_TOKENS = 65_500


def row_columns(row: Row) -> dict[str, np.ndarray]:
    """Return one row with the column names of stock trainers.

    `input_ids`, `labels` (not shifted; -100 where there is no loss), `position_ids`, and `seq_lengths`: the lengths of
    the spans that attend only to themselves.
    """
    attended = attended_lens(row.doc_lens, row.attention)
    shifted = labels(row.tokens, row.doc_lens, row.loss_mask)
    return {
        "input_ids": row.tokens.astype(np.int64),
        "labels": np.concatenate([[IGNORE], shifted[:-1]]),
        "position_ids": position_ids(attended) if row.positions is None else row.positions.astype(np.int64),
        "seq_lengths": attended.astype(np.int64),
    }


def write_format(rows_dir: Path, out_dir: Path, name: str) -> bool:
    """Write the rows of a folder in another format, unless up to date; return whether it was written."""
    write = lookup(FORMATS, name, kind="`format`")
    mark = {"format": name, "rows": (read_manifest(rows_dir) or {}).get("sha256")}
    found = _read_mark(out_dir)
    if found == mark:
        return False
    if out_dir.exists() and found is None and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} exists and holds other files; give a new folder, so that no files are lost.")
    partial = out_dir.with_name(out_dir.name + ".partial")
    with naming(out_dir):
        remove(partial)
        partial.mkdir(parents=True)
        write(open_rows(rows_dir), partial)
        write_atomic(partial / MARK, json.dumps(mark) + "\n")
        remove(out_dir)
        partial.rename(out_dir)
    return True


def _read_mark(folder: Path) -> Any:
    try:
        return json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return None


# Arrow and Parquet


_COLUMNS = ("input_ids", "labels", "position_ids", "seq_lengths")
_SCHEMA = pa.schema([(name, pa.list_(pa.int32())) for name in _COLUMNS])


def _tables(rows: RowSet) -> Iterator[Any]:
    """Yield batches of rows with the columns of `row_columns`."""
    at_once = max(1, BATCH_TOKENS // rows.row_len)
    for first in range(0, len(rows), at_once):
        found = [row_columns(rows[index]) for index in range(first, min(first + at_once, len(rows)))]
        arrays = [pa.array([each[name].astype(np.int32) for each in found], pa.list_(pa.int32())) for name in _COLUMNS]
        yield pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _write_parquet(rows: RowSet, folder: Path) -> None:
    with pq.ParquetWriter(folder / "train-00000-of-00001.parquet", _SCHEMA, compression="zstd") as writer:
        for table in _tables(rows):
            writer.write_table(table)


def _write_arrow(rows: RowSet, folder: Path) -> None:
    """Write a folder for `datasets.load_from_disk`."""
    file = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / file), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for table in _tables(rows):
            writer.write_table(table)
    value = {"dtype": "int32", "_type": "Value"}
    features = {name: {"feature": value, "_type": "Sequence"} for name in _COLUMNS}
    write_atomic(folder / "dataset_info.json", json.dumps({"features": features, "citation": "", "license": ""}) + "\n")
    state: dict[str, Any] = {
        "_data_files": [{"filename": file}],
        "_fingerprint": f"{len(rows):08x}{rows.row_len:08x}",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    write_atomic(folder / "state.json", json.dumps(state) + "\n")


# MDS


def _write_mds(rows: RowSet, folder: Path) -> None:
    """Write shards of `streaming`'s MDS format, version 2, uncompressed."""
    length = rows.row_len
    columns = {"indices": "ndarray:uint32", "input_ids": f"ndarray:uint32:{length}", "mask": f"ndarray:uint8:{length}"}
    sizes: list[int | None] = [None, 4 * length, length]
    if rows[0].positions is not None:
        columns["position_ids"] = f"ndarray:uint32:{length}"
        sizes.append(4 * length)
    config = {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": MDS_SHARD_BYTES,
        "column_names": list(columns),
        "column_encodings": list(columns.values()),
        "column_sizes": sizes,
    }
    head = json.dumps(config, sort_keys=True).encode()
    shards: list[dict[str, Any]] = []
    samples: list[bytes] = []
    for index in range(len(rows)):
        samples.append(_mds_sample(rows[index], with_positions="position_ids" in columns))
        if index + 1 == len(rows) or sum(map(len, samples)) >= MDS_SHARD_BYTES:
            name = f"shard.{len(shards):05d}.mds"
            offsets = np.cumsum([4 + 4 * (len(samples) + 1) + len(head), *map(len, samples)]).astype(np.uint32)
            data = struct.pack("<I", len(samples)) + offsets.tobytes() + head + b"".join(samples)
            (folder / name).write_bytes(data)
            raw = {"basename": name, "bytes": len(data), "hashes": {}}
            shards.append(config | {"samples": len(samples), "raw_data": raw, "zip_data": None})
            samples = []
    write_atomic(folder / "index.json", json.dumps({"version": 2, "shards": shards}) + "\n")


def _mds_sample(row: Row, *, with_positions: bool) -> bytes:
    found = row_columns(row)
    ends = np.cumsum(found["seq_lengths"])
    spans = np.stack([ends - found["seq_lengths"], ends], axis=1).astype(np.uint32)
    # For an array of variable shape, the number of dimensions and the width of their sizes come first.
    indices = bytes([2 << 2 | 2]) + np.array(spans.shape, np.uint32).tobytes() + spans.tobytes()
    mask = (found["labels"] != IGNORE).astype(np.uint8)
    parts = [indices, row.tokens.astype(np.uint32).tobytes(), mask.tobytes()]
    if with_positions:
        parts.append(found["position_ids"].astype(np.uint32).tobytes())
    return struct.pack("<I", len(indices)) + b"".join(parts)


# Megatron-LM


def _write_megatron(rows: RowSet, folder: Path) -> None:
    """Write `data.bin` and `data.idx` for Megatron's `IndexedDataset`: a sequence per document, a document per row."""
    lost: set[str] = set()
    lens: list[np.ndarray] = []
    highest = max(int(rows[index].tokens.max()) for index in range(len(rows)))
    code, dtype = (_UINT16, np.dtype(np.uint16)) if highest < _UINT16_TOKENS else (_INT32, np.dtype(np.int32))
    with (folder / "data.bin").open("wb") as sink:
        for index in range(len(rows)):
            row = rows[index]
            sink.write(row.tokens.astype(dtype).tobytes())
            lens.append(row.doc_lens)
            lost |= _lost_by_megatron(row)
    lengths = np.concatenate(lens).astype(np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
    documents = np.cumsum([0, *map(len, lens)], dtype=np.int64)
    with (folder / "data.idx").open("wb") as sink:
        sink.write(MEGATRON_HEADER + struct.pack("<QBQQ", 1, code, len(lengths), len(documents)))
        for array in (lengths, pointers, documents):
            sink.write(array.tobytes())
    logger.warning(
        "`format='megatron'`: Megatron cuts its samples across rows; train with --reset-position-ids, "
        "--reset-attention-mask and --eod-mask-loss to keep documents apart"
    )
    if lost:
        logger.warning(f"`format='megatron'`: the format cannot store {' and '.join(sorted(lost))}; they are lost")


def _lost_by_megatron(row: Row) -> set[str]:
    lost = set()
    if row.loss_mask is not None and not row.loss_mask.all():
        lost.add("loss masks")
    if row.positions is not None:
        lost.add("position ids")
    if row.attention == "full" and len(row.doc_lens) > 1:
        lost.add("attention across the chunks of a row")
    return lost


FORMATS: dict[str, Callable[[RowSet, Path], None]] = {
    "arrow": _write_arrow,
    "parquet": _write_parquet,
    "mds": _write_mds,
    "megatron": _write_megatron,
}
