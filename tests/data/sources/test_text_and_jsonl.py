import gzip
import json
import os
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from unspool.core.errors import ConfigError, DataError
from unspool.data.sources import files, jsonl, text
from unspool.data.sources.base import Bad, Document, read_items, read_strictly
from unspool.data.sources.jsonl import JsonlSource, text_or_jsonl
from unspool.data.sources.recall import RecallSource
from unspool.data.sources.text import TextSource

COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def jsonl_source(path: str, field: str = "text") -> JsonlSource:
    return JsonlSource(kind="jsonl", path=path, text=field)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def read_jsonl(path: Path, field: str = "text") -> list:
    return list(jsonl_source(str(path), field).read_units([path]))


def read_text(path: Path) -> list:
    return list(TextSource(kind="text", path=str(path)).read_units([path]))


# Finding files


def test_a_pattern_finds_files_in_sorted_order_relative_and_absolute(tmp_path):
    for name in ("x/b-2.jsonl", "x/b-1.jsonl", "x/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines("text"))
    expected = [tmp_path / "x/b-1.jsonl", tmp_path / "x/b-2.jsonl"]
    assert jsonl_source("x/b-*.jsonl").units(tmp_path) == expected
    assert jsonl_source(f"{tmp_path}/**/b-*.jsonl").units(Path("elsewhere")) == expected


def test_the_files_of_generated_documents_are_their_prose(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(lines("prose"))
    source = RecallSource(kind="recall", tokens=1000, length=(64, 128), prose="p.jsonl")
    assert source.units(tmp_path) == [tmp_path / "p.jsonl"]
    assert text_or_jsonl("p.jsonl").kind == "jsonl"
    assert text_or_jsonl("p.txt").kind == "text"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", "'none.jsonl' does not exist"),
        ("no-*.jsonl", "'no-.*' matches no file"),
        ("sub", "holds no .jsonl or .jsonl.gz or .jsonl.zst files"),
    ],
)
def test_a_source_without_files_is_refused(tmp_path, path, message):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("not JSONL")
    with pytest.raises(ConfigError, match=message):
        jsonl_source(path).units(tmp_path)


# Lines


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_are_the_same_however_the_bytes_arrive(size):
    data = b"one\n\ntwo\r\n" + b"x" * 50 + b"\nlast"
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    assert list(files.lines(parts, limit=50)) == [b"one", b"", b"two\r", b"x" * 50, b"last"]
    assert list(files.lines(parts, limit=49)) == [b"one", b"", b"two\r", None, b"last"]


def test_a_line_above_the_limit_is_never_held_whole():
    piece = b"x" * 1_000_000
    tracemalloc.start()
    found = list(files.lines((piece for _ in range(200)), limit=3_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [None]
    assert peak < 10_000_000


# JSONL


@pytest.mark.parametrize("ending", COMPRESS)
def test_jsonl_reads_the_same_plain_and_compressed(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](lines("first", "zweite – Zeile", "x" * 3_000_000)))
    assert read_jsonl(path) == [
        Document(f"a.jsonl{ending}:1", "first"),
        Document(f"a.jsonl{ending}:2", "zweite – Zeile"),
        Document(f"a.jsonl{ending}:3", "x" * 3_000_000),
    ]


def test_several_zstd_frames_in_one_file_are_all_read(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(lines("one")) + zstandard.compress(lines("two")))
    assert [document.text for document in read_jsonl(path)] == ["one", "two"]


def test_blank_lines_are_no_records_and_the_last_line_needs_no_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("one") + b"\n\r\n" + lines("two").rstrip())
    assert read_jsonl(path) == [Document("a.jsonl:1", "one"), Document("a.jsonl:4", "two")]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "cut', "broken_json", "not valid JSON (Unterminated string starting at at column 10)"),
        (b"[" * 100_000, "broken_json", "JSON that cannot be read"),
        (b'{"text": ' + b"9" * 10_000 + b"}", "broken_json", "JSON that cannot be read"),
        (b'["text"]', "not_an_object", "expected a JSON object, not list"),
        (b'{"body": "x", "id": 3}', "missing_field", "no field 'text'; it has 'body', 'id'"),
        (b"{}", "missing_field", "no field 'text'; it has no fields"),
        (b'{"text": null}', "not_text", "field 'text' must be a string, not NoneType"),
        (b'{"text": "\xff"}', "invalid_utf8", "not valid UTF-8 at byte 10"),
        (b'{"text": "ab\\ud800"}', "surrogate", "an unpaired surrogate at character 2"),
        (b'{"text": "ab\\u0000"}', "nul", "a NUL character at 2"),
        (b"\0\0\0", "broken_json", "not valid JSON"),
    ],
)
def test_a_bad_line_is_quarantined_and_reading_continues(tmp_path, line, reason, detail):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("good") + line + b"\n" + lines("also good"))
    first, bad, last = read_jsonl(path)
    assert (first.text, last.text) == ("good", "also good")
    assert (bad.file, bad.record, bad.reason) == (str(path), "line 2", reason)
    assert bad.detail.startswith(detail)


def test_a_line_above_the_limit_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("good", "x" * (1 << 20), "also good"))
    first, bad, last = read_jsonl(path)
    assert (first.text, last.text) == ("good", "also good")
    assert (bad.record, bad.reason, bad.detail) == ("line 2", "too_long", "more than 1 MiB in one line")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_truncated_compressed_file_keeps_its_first_records(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    texts = [f"text {number} " + "y" * 2000 for number in range(2000)]
    path.write_bytes(COMPRESS[ending](lines(*texts))[:-20])
    *documents, bad = read_jsonl(path)
    assert [document.text for document in documents] == texts[: len(documents)]
    assert (bad.reason, bad.record) == ("truncated", f"after line {len(documents)}")


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_file_with_a_wrong_compression_suffix_is_quarantined(tmp_path, ending):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(lines("plain"))
    (bad,) = read_jsonl(path)
    assert (bad.reason, bad.record) == ("unreadable", "after line 0")


def test_a_small_zstd_file_of_gigabytes_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl.zst"
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    zeros = bytes(1 << 24)
    path.write_bytes(b"".join([*(compressor.compress(zeros) for _ in range(32)), compressor.flush()]))
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    (bad,) = read_jsonl(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bad.reason == "too_long"
    assert peak < 300_000_000


def test_a_file_that_has_gone_is_an_error_and_no_bad_record(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        list(read_jsonl(tmp_path / "gone.jsonl"))
    assert error.value.filename == str(tmp_path / "gone.jsonl")


# Text


def test_text_files_are_one_document_each_in_sorted_order(tmp_path):
    for name, content in (
        ("b.txt", "second\r\nline"),
        ("a.txt", "\ufefffirst"),
        (".hidden", "no"),
        ("sub/c.txt", "third"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    source = TextSource(kind="text", path=".")
    assert list(source.read_units(source.units(tmp_path))) == [
        Document("a.txt:1", "first"),
        Document("b.txt:1", "second\r\nline"),
        Document("c.txt:1", "third"),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("café".encode("latin-1"), "invalid_utf8"), (b"a\0b", "nul"), (b"x" * 2000, "too_long")],
)
def test_a_bad_text_file_is_set_aside(tmp_path, monkeypatch, content, reason):
    monkeypatch.setattr(text, "MAX_RECORD_BYTES", 1000)
    (tmp_path / "a.txt").write_bytes(content)
    (bad,) = read_text(tmp_path / "a.txt")
    assert (bad.file, bad.record, bad.reason) == (str(tmp_path / "a.txt"), "whole file", reason)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_text_reads_as_plain_and_a_cut_file_is_set_aside(tmp_path, ending):
    path = tmp_path / f"a.txt{ending}"
    whole = COMPRESS[ending]("Käse ".encode() * 1000)
    path.write_bytes(whole)
    assert read_text(path) == [Document(f"a.txt{ending}:1", "Käse " * 1000)]
    path.write_bytes(whole[:-5])
    assert [bad.reason for bad in read_text(path)] == ["truncated"]


def test_reading_strictly_stops_at_the_first_bad_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("good") + b"{\n")
    source = jsonl_source("a.jsonl")
    found = read_strictly(source, [path])
    assert next(found).text == "good"
    with pytest.raises(DataError, match=r"a.jsonl, line 2: not valid JSON .*\.$"):
        next(found)


def test_every_line_gives_exactly_one_item(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines("good", "") + b"{\n" + b'{"x": 1}\n')
    kinds = [type(item) for item in read_jsonl(path)]
    assert kinds == [Document, Document, Bad, Bad]


def test_a_file_whose_name_is_not_utf8_is_read_under_a_name_that_can_be_stored(tmp_path):
    name = os.fsdecode(b"\xff.jsonl")
    (tmp_path / name).write_bytes(lines("one") + b"{")
    good, bad = read_items(jsonl_source(name), [tmp_path / name])
    assert isinstance(good, Document) and isinstance(bad, Bad)
    assert good.id == r"\xff.jsonl:1"
    assert bad.file == str(tmp_path / r"\xff.jsonl")
