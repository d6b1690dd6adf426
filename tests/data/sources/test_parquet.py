"""Parquet files are read record by record, and damage costs no more than the row group it lies in."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unspool.core.errors import ConfigError
from unspool.data.sources import arrow
from unspool.data.sources.base import Bad, Document, Filtered, Item
from unspool.data.sources.parquet import ParquetSource

TEXTS = ["one", "zwei – drei", "vier\nfünf", "😀" * 50]


def source(path: str = ".", text: str = "text") -> ParquetSource:
    return ParquetSource(kind="parquet", path=path, text=text)


def write(path: Path, values: Any, *, name: str = "text", **options: Any) -> Path:
    pq.write_table(pa.table({"id": list(range(len(values))), name: values}), path, **options)
    return path


def read(path: Path, text: str = "text") -> list[Item]:
    return list(source(text=text).read_units([path]))


def texts(items: list[Item]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


def bad(items: list[Item]) -> list[tuple[str, str]]:
    return [(item.record, item.reason) for item in items if isinstance(item, Bad)]


def invalid_utf8(*values: bytes) -> pa.Array:
    """A string column that holds these bytes: Arrow writes and reads it without looking."""
    return pa.array(values, type=pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    "values",
    [
        pa.array(TEXTS, type=pa.string()),
        pa.array(TEXTS, type=pa.large_string()),
        pa.array(TEXTS, type=pa.string_view()),
        pa.array([text.encode() for text in TEXTS], type=pa.binary()),
        pa.array([text.encode() for text in TEXTS], type=pa.large_binary()),
        pa.array(TEXTS).dictionary_encode(),
    ],
    ids=lambda values: str(values.type)[:24],
)
def test_every_column_type_that_holds_text_is_read(tmp_path, values):
    items = read(write(tmp_path / "a.parquet", values))

    assert texts(items) == TEXTS
    assert [item.id for item in items if isinstance(item, Document)] == [f"a.parquet:{n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
def test_records_are_in_order_across_row_groups_pages_and_batches(tmp_path, compression):
    rng = np.random.default_rng(0)
    expected = [f"{number} " + "x" * int(rng.integers(0, 3000)) for number in range(5000)]
    path = write(tmp_path / "a.parquet", expected, row_group_size=1700, data_page_size=1000, compression=compression)

    assert texts(read(path)) == expected


def test_a_field_of_a_struct_is_named_with_a_dot(tmp_path):
    values = pa.array([{"b": {"c": "in"}, "d": 1}, {"b": None, "d": 2}, None])
    path = write(tmp_path / "a.parquet", values, name="a")

    assert texts(read(path, "a.b.c")) == ["in"]
    assert bad(read(path, "a.b.c")) == [("record 2", "not_text"), ("record 3", "not_text")]
    assert bad(read(path, "a.x")) == [("whole file", "missing_field")]


def test_a_column_whose_own_name_has_a_dot_is_found(tmp_path):
    assert texts(read(write(tmp_path / "a.parquet", TEXTS, name="a.b"), "a.b")) == TEXTS


def test_bad_records_are_set_aside_one_by_one_and_empty_ones_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "MAX_RECORD_BYTES", 1 << 20)
    values = invalid_utf8(b"one", b"\xff\xfe", b"a\0b", b"", b"\xed\xa0\x80", b"x" * (1 << 20), b"x" * ((1 << 20) + 1))
    path = write(tmp_path / "a.parquet", values)

    items = read(path)

    assert [item.text[:3] for item in items if isinstance(item, Document)] == ["one", "xxx"]
    assert bad(items) == [
        ("record 2", "invalid_utf8"),
        ("record 3", "nul"),
        ("record 5", "invalid_utf8"),
        ("record 7", "too_long"),
    ]
    assert [item.id for item in items if isinstance(item, Filtered)] == ["a.parquet:4"]
    assert len(items) == len(values)


def test_a_null_is_set_aside(tmp_path):
    items = read(write(tmp_path / "a.parquet", ["one", None, "two"]))
    assert texts(items) == ["one", "two"]
    assert bad(items) == [("record 2", "not_text")]


def test_a_missing_column_is_one_bad_record_per_file_that_names_those_present(tmp_path):
    first = write(tmp_path / "a.parquet", TEXTS, name="body")
    second = write(tmp_path / "b.parquet", TEXTS)

    items = list(source().read_units([first, second]))

    assert bad(items) == [("whole file", "missing_field")]
    assert isinstance(items[0], Bad) and "'body'" in items[0].detail and items[0].file == str(first)
    assert texts(items) == TEXTS


@pytest.mark.parametrize("values", [[1, 2], [1.5], [["one"], ["two"]], [{"b": "one"}]])
def test_a_column_of_another_type_is_one_bad_record(tmp_path, values):
    assert bad(read(write(tmp_path / "a.parquet", values))) == [("whole file", "not_text")]


def test_a_damaged_page_costs_its_row_group_and_the_next_ones_are_read_on(tmp_path):
    expected = [f"{number} " + "word " * 200 for number in range(300)]
    path = write(
        tmp_path / "a.parquet",
        expected,
        row_group_size=100,
        compression="snappy",
        use_dictionary=False,
        write_page_checksum=True,
    )
    middle = pq.ParquetFile(path).metadata.row_group(1).column(1)
    data = bytearray(path.read_bytes())
    data[middle.data_page_offset + middle.total_compressed_size // 2] ^= 0xFF
    path.write_bytes(data)

    items = read(path)

    assert bad(items) == [("after record 100", "corrupt_page")]
    assert texts(items) == expected[:100] + expected[200:]
    ids = [item.id for item in items if isinstance(item, Document)]
    assert ids[100] == "a.parquet:201", "records after the damage must keep their numbers"
    assert isinstance(items[100], Bad) and "100 records are lost" in items[100].detail


def test_a_truncated_file_is_distinguished_from_one_that_is_not_parquet(tmp_path):
    whole = write(tmp_path / "a.parquet", TEXTS * 100).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.parquet").write_bytes(b"no Parquet at all, only some text")
    (tmp_path / "empty.parquet").write_bytes(b"")

    assert bad(read(tmp_path / "cut.parquet")) == [("whole file", "truncated")]
    assert bad(read(tmp_path / "text.parquet")) == [("whole file", "unreadable")]
    assert bad(read(tmp_path / "empty.parquet")) == [("whole file", "unreadable")]
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "gone.parquet")


def test_a_file_without_records_gives_nothing(tmp_path):
    assert read(write(tmp_path / "a.parquet", pa.array([], type=pa.string()))) == []


def test_a_batch_never_holds_many_long_records(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_BATCH_BYTES", 1000)
    sizes = []
    original = arrow.text_items
    monkeypatch.setattr(arrow, "text_items", lambda array, *rest: (sizes.append(len(array)), original(array, *rest))[1])
    expected = [f"{number:0400}" for number in range(20)]

    assert texts(read(write(tmp_path / "a.parquet", expected, use_dictionary=False))) == expected
    assert max(sizes) == 2


def test_mutated_files_give_items_and_never_an_error(tmp_path):
    texts_in = [f"{number} " + "word " * 20 for number in range(60)]
    path = write(tmp_path / "a.parquet", texts_in, row_group_size=20, compression="zstd")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for _ in range(150):
        data = bytearray(whole)
        for position in rng.integers(0, len(data), size=int(rng.integers(1, 4))):
            data[position] = int(rng.integers(256))
        path.write_bytes(data[: int(rng.integers(1, len(data)))] if rng.random() < 0.2 else data)
        items = read(path)
        assert items, "a file that held records must give at least one item"
        assert len(items) <= 60 + 3
        seen.update(item.reason for item in items if isinstance(item, Bad))
    assert {"corrupt_page", "truncated", "unreadable"} <= set(seen), "the mutations missed a kind of damage"


def test_the_units_are_the_sorted_files(tmp_path):
    for name in ("b.parquet", "a.parquet", "c.txt"):
        (tmp_path / name).touch()
    assert source().units(tmp_path) == [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(ConfigError, match="does not exist"):
        source("missing").units(tmp_path)
