"""MDS folders read back exactly; the writer here follows the public specification and knows nothing of the reader."""

import bz2
import gzip
import hashlib
import json
import os
import pickle
import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from unspool.base.errors import ConfigError
from unspool.data.documents import Bad, Document, Filtered, Item
from unspool.data.readers import mds
from unspool.data.sources import MdsSource

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


def source(path: str = ".", tokens: str = "input_ids") -> MdsSource:
    return MdsSource(kind="mds", path=path, tokens=tokens)


def read(root: Path, path: str = ".", tokens: str = "input_ids") -> list[Item]:
    settings = source(path, tokens)
    return list(mds.read(settings, mds.units(settings, root), seed=0))


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


@pytest.mark.parametrize("compression", [None, "zstd:7", "zstd", "gz", "bz2:9"])
@pytest.mark.parametrize("seed", range(3))
def test_unpacked_documents_read_back_exactly(tmp_path, compression, seed):
    samples = unpacked(np.random.default_rng(seed), 50)
    write(tmp_path / "books", UNPACKED, samples, per_shard=17, compression=compression, hashes=("sha1",))

    items = read(tmp_path)

    assert tokens_of(items) == [sample["input_ids"].tolist() for sample in samples]
    assert all(isinstance(item, Document) and item.tokens.dtype == np.uint32 and item.text == "" for item in items)
    names = [item.id.rsplit("/", 1)[1].partition(".mds")[0] for item in items if isinstance(item, Document)]
    assert Counter(names) == {"shard.00000": 17, "shard.00001": 17, "shard.00002": 16}
    assert isinstance(items[17], Document) and items[17].id.startswith("books/shard.00001.mds")
    assert items[17].id.endswith(":1")


@pytest.mark.parametrize("compression", [None, "zstd:7"])
def test_packed_rows_yield_their_documents_apart(tmp_path, compression):
    rng = np.random.default_rng(0)
    samples, expected = [], []
    for _ in range(30):
        row = rng.integers(0, 128_256, size=4096).astype(np.uint32)
        cuts = [0, *sorted(rng.choice(np.arange(1, 4096), size=int(rng.integers(6)), replace=False).tolist()), 4096]
        borders = np.array(list(pairwise(cuts)), dtype=np.uint32)
        samples.append({"domain": "x", "indices": borders, "input_ids": row, "length": 4096})
        expected += [row[begin:end].tolist() for begin, end in borders]
    write(tmp_path, PACKED, samples, per_shard=11, compression=compression)

    items = read(tmp_path)

    assert tokens_of(items) == expected
    ids = [item.id for item in items if isinstance(item, Document)]
    assert len(set(ids)) == len(ids) and ids[0].endswith(":1.1")


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [(f"ndarray:{dtype}", dtype) for dtype in ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")]
    + [("ndarray", "uint16"), ("ndarray", "int64"), ("ndarray:uint32:64", "uint32"), ("json", "int64")],
)
def test_tokens_of_every_whole_number_type_become_uint32(tmp_path, encoding, dtype):
    values = np.random.default_rng(0).integers(0, 100, size=64).astype(dtype)
    write(tmp_path, {"input_ids": encoding}, [{"input_ids": values.tolist() if encoding == "json" else values}])

    (document,) = read(tmp_path)

    assert isinstance(document, Document) and document.tokens is not None
    assert document.tokens.dtype == np.uint32 and document.tokens.tolist() == values.tolist()


@pytest.mark.parametrize("length", [1, 255, 256, 65_535, 65_536])
def test_the_width_of_a_length_follows_its_size(tmp_path, length):
    write(tmp_path, {"input_ids": "ndarray:uint32"}, [{"input_ids": np.arange(length, dtype=np.uint32)}])
    assert tokens_of(read(tmp_path)) == [list(range(length))]


def test_columns_that_are_not_needed_are_stepped_over_unread(tmp_path):
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    columns = {"a": "pkl", "b": "bytes", "c": "float32", "d": "str", "input_ids": "ndarray:uint32", "z": "uint8"}
    columns |= {"j": "jpeg", "f": "float64"}
    values = {"a": Trap(), "b": b"\xff" * 7, "c": 1.5, "d": "ä", "z": 3, "f": 2.5}
    row = np.array([5, 6, 7], dtype=np.uint32)
    shards = write(tmp_path, columns | {"j": "bytes"}, [values | {"j": b"no image", "input_ids": row}])
    save_index(tmp_path, [shards[0] | {"column_encodings": [columns[name] for name in sorted(columns)]}])

    assert tokens_of(read(tmp_path)) == [[5, 6, 7]]
    assert not (tmp_path / "sprung").exists()


def test_a_pickled_column_of_tokens_or_borders_is_refused(tmp_path):
    row = np.array([1, 2], dtype=np.uint32)
    write(tmp_path / "tokens", {"input_ids": "pkl"}, [{"input_ids": row}])
    write(
        tmp_path / "borders", PACKED | {"indices": "pkl"}, [{"domain": "", "indices": 1, "input_ids": row, "length": 2}]
    )

    for folder in ("tokens", "borders"):
        (item,) = read(tmp_path, folder)
        assert isinstance(item, Bad) and item.reason == "not_tokens" and "pickled" in item.detail


def test_the_tokens_may_lie_in_another_column(tmp_path):
    write(tmp_path, {"ids": "ndarray:int32"}, [{"ids": np.array([3, 4], dtype=np.int32)}])
    assert tokens_of(read(tmp_path, tokens="ids")) == [[3, 4]]
    (item,) = read(tmp_path)
    assert isinstance(item, Bad) and item.reason == "missing_field" and "'ids'" in item.detail


# Folders


def merged(folder: Path, shards: dict[str, list[dict[str, Any]]]) -> None:
    """An index over all parts of a folder, as ProLong's tools write it beside the index of each part."""
    together = []
    for part, listed in shards.items():
        for shard in json.loads(json.dumps(listed)):
            for key in ("raw_data", "zip_data"):
                if shard[key]:
                    shard[key]["basename"] = f"{part}/{shard[key]['basename']}"
            together.append(shard)
    save_index(folder, together)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("keep", ["both", "merged", "parts"])
def test_a_shard_that_several_indexes_name_is_read_once(tmp_path, compression, keep):
    rng = np.random.default_rng(0)
    expected, shards = [], {}
    for part in ("proc00-64", "proc01-64"):
        samples = unpacked(rng, 6)
        shards[part] = write(tmp_path / "book" / part, UNPACKED, samples, per_shard=3, compression=compression)
        expected += [sample["input_ids"].tolist() for sample in samples]
        if keep == "merged":
            (tmp_path / "book" / part / "index.json").unlink()
    if keep != "parts":
        merged(tmp_path / "book", shards)

    assert len(mds.units(source(), tmp_path)) == 4
    assert tokens_of(read(tmp_path)) == expected


def test_a_shard_that_is_not_there_is_one_bad_record_and_no_unit(tmp_path):
    rng = np.random.default_rng(0)
    shards = {"part": write(tmp_path / "book/part", UNPACKED, unpacked(rng, 6), per_shard=3)}
    merged(tmp_path / "book", shards)
    (tmp_path / "book/part/shard.00000.mds").unlink()

    units = mds.units(source(), tmp_path)
    items = read(tmp_path)

    assert all(unit.is_file() for unit in units)
    assert len(tokens_of(items)) == 3
    assert [(Path(item.file).name, item.reason) for item in items if isinstance(item, Bad)] == [
        ("shard.00000.mds", "unreadable")
    ]


def test_a_shard_that_is_a_pipe_is_not_waited_for(tmp_path):
    write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 2))
    (tmp_path / "shard.00000.mds").unlink()
    os.mkfifo(tmp_path / "shard.00000.mds")
    assert bad(read(tmp_path)) == [("whole file", "unreadable")]


def test_units_are_sorted_shards_that_can_be_read_apart(tmp_path):
    samples = unpacked(np.random.default_rng(0), 9)
    write(tmp_path / "b", UNPACKED, samples, per_shard=3)
    write(tmp_path / "a", UNPACKED, samples, per_shard=5)

    units = mds.units(source(), tmp_path)

    assert [str(unit.relative_to(tmp_path)) for unit in units] == [
        f"{folder}/shard.{number:05}.mds" for folder, count in (("a", 2), ("b", 3)) for number in range(count)
    ]
    apart = [tokens for unit in units for tokens in tokens_of(list(mds.read(source(), [unit], seed=0)))]
    assert apart == tokens_of(read(tmp_path)) and len(apart) == 18
    assert mds.units(source("a/shard.00001.mds"), tmp_path) == [units[1]]
    assert mds.units(source("*/index.json"), tmp_path) == units


def test_a_decompressed_shard_is_preferred_to_its_compressed_form(tmp_path):
    samples = unpacked(np.random.default_rng(0), 3)
    write(tmp_path, UNPACKED, samples, compression="zstd")
    packed = tmp_path / "shard.00000.mds.zstd"
    (tmp_path / "shard.00000.mds").write_bytes(zstandard.decompress(packed.read_bytes()))
    packed.write_bytes(b"not needed")

    assert tokens_of(read(tmp_path)) == [sample["input_ids"].tolist() for sample in samples]


def test_no_index_or_no_shard_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no index\.json"):
        mds.units(source(), tmp_path)
    save_index(tmp_path, [])
    with pytest.raises(ConfigError, match="name no shard"):
        mds.units(source(), tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "broken_json"),
        (b"\xff\xfe", "broken_json"),
        (b"[" * 100_000, "broken_json"),
        (b"[]", "unreadable"),
        (b'{"version": 2}', "unreadable"),
        (b'{"shards": {}}', "unreadable"),
    ],
)
def test_a_broken_index_is_set_aside_and_its_neighbours_read(tmp_path, content, reason):
    write(tmp_path / "good", UNPACKED, unpacked(np.random.default_rng(0), 2))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "index.json").write_bytes(content)

    items = read(tmp_path)

    assert bad(items) == [("whole file", reason)] and len(tokens_of(items)) == 2


@pytest.mark.parametrize(
    "name",
    ["../outside.mds", "/etc/passwd", "a/../../outside.mds", "index.json", "..", "a\0b", "", 7, "x" * 300, "\ud800"],
)
def test_an_index_that_names_a_file_outside_its_folder_is_set_aside(tmp_path, name):
    folder = tmp_path / "in"
    (shard,) = write(folder, UNPACKED, unpacked(np.random.default_rng(0), 2))
    (tmp_path / "outside.mds").write_bytes((folder / "shard.00000.mds").read_bytes())
    save_index(folder, [shard, shard | {"raw_data": shard["raw_data"] | {"basename": name}}, "no shard"])

    items = read(folder)

    assert len(tokens_of(items)) == 2
    assert [record for record, _ in bad(items)] == ["shard 2", "shard 3"]
    assert all(reason in ("unsafe_path", "unreadable") for _, reason in bad(items))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"format": "jsonl"},
        {"column_names": None},
        {"column_names": ["input_ids"]},
        {"column_names": [1, 2, 3]},
        {"column_encodings": "str"},
        {"column_sizes": [None, None]},
        {"column_sizes": [None, -1, None]},
        {"samples": "2"},
        {"samples": 3},
        {"zip_data": [1], "raw_data": {"basename": "shard.00000.mds", "hashes": {"sha1": 5}}},
    ],
)
def test_an_index_entry_that_makes_no_sense_sets_the_shard_aside(tmp_path, change):
    (shard,) = write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 2))
    save_index(tmp_path, [shard | change])

    items = read(tmp_path)

    assert [record for record, _ in bad(items)] == ["whole file"] and len(items) == 1


# Damaged shards


def test_a_shard_cut_short_keeps_its_whole_samples(tmp_path):
    samples = unpacked(np.random.default_rng(0), 5)
    write(tmp_path, UNPACKED, samples)
    path = tmp_path / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-10])
    items = read(tmp_path)
    assert tokens_of(items) == [sample["input_ids"].tolist() for sample in samples[:-1]]
    assert bad(items) == [("sample 5", "truncated")]

    path.write_bytes(path.read_bytes()[:10])
    assert bad(read(tmp_path)) == [("whole file", "truncated")]
    path.write_bytes(b"")
    assert bad(read(tmp_path)) == [("whole file", "truncated")]
    path.unlink()
    assert bad(read(tmp_path)) == [("whole file", "unreadable")]


@pytest.mark.parametrize("compression", ["zstd", "gz"])
def test_a_compressed_shard_cut_short_keeps_what_can_be_had(tmp_path, compression):
    samples = unpacked(np.random.default_rng(0), 40)
    write(tmp_path, UNPACKED, samples, compression=compression)
    (path,) = tmp_path.glob("shard*")
    path.write_bytes(path.read_bytes()[:-40])

    items = read(tmp_path)

    good = tokens_of(items)
    assert good == [sample["input_ids"].tolist() for sample in samples[: len(good)]]
    assert len(items) in (1, 40) and {reason for _, reason in bad(items)} == {"truncated"}


def test_a_damaged_compressed_shard_is_set_aside_whole(tmp_path):
    write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 4), compression="zstd")
    (tmp_path / "shard.00000.mds.zstd").write_bytes(b"no zstd frame at all")
    assert bad(read(tmp_path)) == [("whole file", "unreadable")]


def test_a_shard_that_unfolds_beyond_its_size_is_set_aside(tmp_path):
    (shard,) = write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 4), compression="zstd")
    (tmp_path / "shard.00000.mds.zstd").write_bytes(zstandard.compress(bytes(50 << 20)))
    assert bad(read(tmp_path)) == [("whole file", "archive_bomb")]
    save_index(tmp_path, [shard | {"raw_data": shard["raw_data"] | {"bytes": 1 << 40}}])
    assert bad(read(tmp_path)) == [("whole file", "too_long")]


def test_an_unknown_compression_says_which_are_read(tmp_path):
    write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 2), compression="br")
    (item,) = read(tmp_path)
    assert isinstance(item, Bad) and item.reason == "unreadable"
    assert all(word in item.detail for word in ("'br'", "zstd", "gz", "bz2"))


def test_a_wrong_sum_sets_the_shard_aside_and_an_unknown_one_does_not(tmp_path):
    (shard,) = write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 2), hashes=("sha1", "sha256"))
    assert len(tokens_of(read(tmp_path))) == 2
    info = shard["raw_data"]
    save_index(tmp_path, [shard | {"raw_data": info | {"hashes": {"sha1": "0" * 40}}}])
    (item,) = read(tmp_path)
    assert isinstance(item, Bad) and item.reason == "unreadable" and "sha1" in item.detail
    save_index(tmp_path, [shard | {"raw_data": info | {"hashes": {"house_sum": "0" * 40, "shake_128": "0"}}}])
    assert len(tokens_of(read(tmp_path))) == 2


def test_sums_of_xxhash_are_checked_where_it_is_installed(tmp_path, monkeypatch):
    (shard,) = write(tmp_path / "data", UNPACKED, unpacked(np.random.default_rng(0), 2))
    save_index(tmp_path / "data", [shard | {"raw_data": shard["raw_data"] | {"hashes": {"xxh64": "0"}}}])
    monkeypatch.setattr(mds, "find_spec", lambda name: None)
    assert len(tokens_of(read(tmp_path / "data"))) == 2

    fake = type("xxhash", (), {"xxh64": lambda: hashlib.md5(), "xxh64_digest": lambda data: b""})
    monkeypatch.setattr(mds, "find_spec", lambda name: fake)
    monkeypatch.setattr(mds, "import_module", lambda name: fake)
    assert bad(read(tmp_path / "data")) == [("whole file", "unreadable")]

    # Also a name there, but not that of a sum.
    save_index(tmp_path / "data", [shard | {"raw_data": shard["raw_data"] | {"hashes": {"xxh64_digest": "0"}}}])
    assert len(tokens_of(read(tmp_path / "data"))) == 2


def test_lying_offsets_cost_only_their_samples(tmp_path):
    samples = unpacked(np.random.default_rng(0), 6)
    write(tmp_path, UNPACKED, samples)
    path = tmp_path / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    data[4 + 4 * 3 : 4 + 4 * 4] = struct.pack("<I", 7)  # the end of the third sample and the start of the fourth
    path.write_bytes(data)

    items = read(tmp_path)

    kept = [sample["input_ids"].tolist() for sample in (*samples[:2], *samples[4:])]
    assert tokens_of(items) == kept
    assert bad(items) == [("sample 3", "bad_offsets"), ("sample 4", "bad_offsets")]


def test_lying_column_sizes_cost_only_their_sample(tmp_path):
    good = {"domain": "d", "input_ids": np.array([1, 2], dtype=np.uint32), "length": 2}
    whole = sample_bytes(UNPACKED, good)
    longer = struct.pack("<I", 1 << 31) + whole[4:]
    write(tmp_path, UNPACKED, [good] * 4)
    (tmp_path / "shard.00000.mds").write_bytes(shard_bytes([whole, longer, whole[:6], whole]))

    items = read(tmp_path)

    assert tokens_of(items) == [[1, 2], [1, 2]]
    assert bad(items) == [("sample 2", "bad_offsets"), ("sample 3", "bad_offsets")]


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("ndarray:int32", np.array([1, -1], dtype=np.int32)),
        ("ndarray:int64", np.array([1, 1 << 32], dtype=np.int64)),
        ("ndarray:uint64", np.array([(1 << 64) - 1], dtype=np.uint64)),
        ("ndarray:float32", np.array([1.0], dtype=np.float32)),
        ("ndarray", np.array([1.0], dtype=np.float64)),
        ("ndarray:uint32", np.array([[1, 2]], dtype=np.uint32)),
        ("ndarray:uint32", np.array(7, dtype=np.uint32)),
        ("json", [1, 1.5]),
        ("json", [1, "two"]),
        ("json", [[1], [2, 3]]),
        ("json", {"a": 1}),
        ("json", [1 << 70]),
        ("json", [True]),
        ("str", "1 2 3"),
        ("bytes", b"\1\0\0\0"),
        ("int", 7),
    ],
)
def test_what_are_no_tokens_is_set_aside(tmp_path, encoding, value):
    good = np.array([4], dtype=np.uint32)
    write(tmp_path / "a", {"input_ids": encoding}, [{"input_ids": value}])
    write(tmp_path / "b", {"input_ids": "ndarray:uint32"}, [{"input_ids": good}])

    items = read(tmp_path)

    assert tokens_of(items) == [[4]]
    assert [record for record, _ in bad(items)] == ["sample 1"]
    assert bad(items)[0][1] in ("not_tokens", "broken_json")


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("ndarray", b""),
        ("ndarray", b"\x20"),
        ("ndarray", b"\xc8\x04\x01" + bytes(4)),
        ("ndarray:uint32", b"\x07\xff" + bytes(4)),
        ("ndarray:uint32", b"\x04\x02" + bytes(4)),
        ("ndarray:uint32", b"\x04\x01" + bytes(5)),
        ("ndarray:uint32", b"\xff" * 600),
        ("ndarray:complex64", b"\x04\x01" + bytes(8)),
        ("ndarray:uint32:x", bytes(8)),
        ("ndarray:uint32:-1,-2", bytes(8)),
    ],
)
def test_arrays_whose_head_lies_are_set_aside(tmp_path, encoding, data):
    (shard,) = write(tmp_path, {"input_ids": "bytes"}, [{"input_ids": data}])
    save_index(tmp_path, [shard | {"column_encodings": [encoding]}])
    assert bad(read(tmp_path)) == [("sample 1", "not_tokens")]


@pytest.mark.parametrize(
    "borders",
    [
        [[0, 11]],
        [[0, 6], [5, 10]],
        [[6, 4]],
        [[-1, 4]],
        [[0, 5], [0, 5]],
        [[0, 1, 2]],
        [0, 5],
        [[0.0, 5.0]],
    ],
)
def test_borders_that_leave_the_row_or_overlap_set_the_sample_aside(tmp_path, borders):
    columns = {"input_ids": "ndarray:uint32", "indices": "ndarray"}
    row = np.arange(10, dtype=np.uint32)
    good = {"input_ids": row, "indices": np.array([[0, 10]], dtype=np.uint32)}
    write(tmp_path, columns, [{"input_ids": row, "indices": np.array(borders)}, good])

    items = read(tmp_path)

    assert bad(items) == [("sample 1", "bad_borders")] and tokens_of(items) == [row.tolist()]


def test_borders_with_gaps_leave_tokens_out_and_empty_documents_are_counted(tmp_path):
    columns = {"input_ids": "ndarray:uint32", "indices": "json"}
    row = np.arange(10, dtype=np.uint32)
    write(
        tmp_path, columns, [{"input_ids": row, "indices": [[2, 4], [4, 4], [7, 10]]}, {"input_ids": row, "indices": []}]
    )

    items = read(tmp_path)

    assert tokens_of(items) == [[2, 3], [7, 8, 9]]
    assert [item.reason for item in items if isinstance(item, Filtered)] == ["empty"]
    assert bad(items) == []


def test_an_empty_document_is_counted_as_such(tmp_path):
    write(tmp_path, {"input_ids": "json"}, [{"input_ids": []}])
    (item,) = read(tmp_path)
    assert isinstance(item, Filtered) and item.reason == "empty"


def test_a_sample_above_the_limit_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(mds, "MAX_RECORD_BYTES", 1000)
    rows = [np.arange(num, dtype=np.uint32) for num in (10, 300, 20)]
    write(tmp_path, {"input_ids": "ndarray:uint32"}, [{"input_ids": row} for row in rows])

    items = read(tmp_path)

    assert tokens_of(items) == [rows[0].tolist(), rows[2].tolist()] and bad(items) == [("sample 2", "too_long")]


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
def test_mutated_shards_give_items_and_never_an_error(tmp_path, compression):
    rng = np.random.default_rng(0)
    rows = [random_tokens(rng, 40) for _ in range(12)]
    borders = [np.array([[0, len(row)]], dtype=np.uint32) for row in rows]
    samples = [
        {"domain": "d", "indices": border, "input_ids": row, "length": len(row)}
        for row, border in zip(rows, borders, strict=True)
    ]
    write(tmp_path, PACKED, samples, compression=compression)
    (path,) = tmp_path.glob("shard*")
    whole = path.read_bytes()
    reasons: Counter[str] = Counter()
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, len(data), size=int(rng.integers(1, 4))):
            data[position] = int(rng.integers(256))
        path.write_bytes(data[: int(rng.integers(len(data)))] if rng.random() < 0.2 else data)
        items = read(tmp_path)
        assert len(items) in (1, 12), "one item per sample, or one for a shard that cannot be read at all"
        reasons.update(reason for _, reason in bad(items))
    assert len(reasons) > 1, "the mutations hardly broke anything"
