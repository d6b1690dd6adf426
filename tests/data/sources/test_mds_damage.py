"""MDS shards that are truncated, inconsistent or damaged lose only the affected records."""

import hashlib
import struct
from collections import Counter

import numpy as np
import pytest
import zstandard

from unspool.data.sources import mds
from unspool.data.sources.base import Bad, Filtered

from .mds_folders import (
    PACKED,
    UNPACKED,
    bad,
    random_tokens,
    read,
    sample_bytes,
    save_index,
    shard_bytes,
    tokens_of,
    unpacked,
    write,
)


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
def test_a_truncated_compressed_shard_keeps_its_first_samples(tmp_path, compression):
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


def test_an_unknown_compression_lists_the_supported_ones(tmp_path):
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
def test_values_that_are_not_tokens_are_quarantined(tmp_path, encoding, value):
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
