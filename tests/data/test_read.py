import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from unspool.base.errors import ConfigError, DataError
from unspool.data.read import Document, read_documents, source_files
from unspool.data.sources import ChatSource, JsonlSource, ParquetSource, RecallSource, TextSource


def jsonl(path: str, text: str = "text") -> JsonlSource:
    return JsonlSource(kind="jsonl", path=path, text=text)


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_jsonl_reads_the_same_plain_and_compressed(tmp_path, ending):
    data = lines("first", "zweite – Zeile", "x" * 3_000_000)
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[ending]
    (tmp_path / f"a.{ending}").write_bytes(pack(data))

    documents = list(read_documents(jsonl(f"a.{ending}"), tmp_path))

    assert [document.text[:14] for document in documents] == ["first", "zweite – Zeile", "x" * 14]
    assert len(documents[2].text) == 3_000_000
    assert [document.id for document in documents] == [f"a.{ending}:{number}" for number in (1, 2, 3)]


def test_several_zstd_frames_in_one_file_are_all_read(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines("one")) + zstandard.compress(lines("two")))
    assert [document.text for document in read_documents(jsonl("a.jsonl.zst"), tmp_path)] == ["one", "two"]


def test_blank_lines_are_passed_over_but_counted_and_the_last_line_needs_no_newline(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines("one") + b"\n\r\n" + lines("two").rstrip())
    assert list(read_documents(jsonl("a.jsonl"), tmp_path)) == [
        Document("a.jsonl:1", "one"),
        Document("a.jsonl:4", "two"),
    ]


def test_text_files_are_one_document_each_in_sorted_order(tmp_path):
    for name, text in (
        ("b.txt", "second\r\nline"),
        ("a.txt", "\ufefffirst"),
        (".hidden", "no"),
        ("sub/c.txt", "third"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())

    documents = list(read_documents(TextSource(kind="text", path="."), tmp_path))

    assert documents == [
        Document("a.txt:1", "first"),
        Document("b.txt:1", "second\r\nline"),
        Document("c.txt:1", "third"),
    ]


def test_parquet_reads_one_document_per_record_over_batches(tmp_path):
    texts = [f"text {number}" for number in range(600)]
    pq.write_table(pa.table({"other": list(range(600)), "body": texts}), tmp_path / "a.parquet", row_group_size=100)

    documents = list(read_documents(ParquetSource(kind="parquet", path="*.parquet", text="body"), tmp_path))

    assert [document.text for document in documents] == texts
    assert documents[-1].id == "a.parquet:600"


def test_a_pattern_finds_files_in_sorted_order_relative_and_absolute(tmp_path):
    for name in ("x/b-2.jsonl", "x/b-1.jsonl", "x/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines("text"))
    expected = [tmp_path / "x/b-1.jsonl", tmp_path / "x/b-2.jsonl"]
    assert source_files(jsonl("x/b-*.jsonl"), tmp_path) == expected
    assert source_files(jsonl(f"{tmp_path}/**/b-*.jsonl"), Path("elsewhere")) == expected


def test_the_files_of_generated_documents_are_their_prose(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(lines("prose"))
    source = RecallSource(kind="recall", tokens=1000, length=(64, 128), prose="p.jsonl")
    assert source_files(source, tmp_path) == [tmp_path / "p.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", "'none.jsonl' does not exist"),
        ("no-*.jsonl", "'no-.*' matches no file"),
        ("sub", "holds no .jsonl"),
    ],
)
def test_a_source_without_files_is_refused(tmp_path, path, message):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("not JSONL")
    with pytest.raises(ConfigError, match=message):
        source_files(jsonl(path), tmp_path)


def test_kinds_that_cannot_be_read_yet_say_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"chat cannot be read yet. Render the conversations"):
        source_files(ChatSource(kind="chat", path="x"), tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"a.jsonl, line 2: not valid JSON \(.* at column"),
        (b'["text"]', "a.jsonl, line 2: a JSON object was expected, not list"),
        (b'{"body": "x", "id": 3}', "a.jsonl, line 2: no field 'text'; it has 'body', 'id'"),
        (b'{"text": null}', "a.jsonl, line 2: field 'text' must be a string, not NoneType"),
        (b'{"text": "\xff"}', "a.jsonl, line 2: not valid UTF-8 at byte 10"),
        (b'{"text": "ab\\ud800"}', "a.jsonl, line 2: field 'text' has half a surrogate pair at character 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(lines("good") + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(read_documents(jsonl("a.jsonl"), tmp_path))


@pytest.mark.parametrize(("ending", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_a_compressed_file_that_was_cut_short_is_refused(tmp_path, ending, compress):
    whole = compress(lines(*(f"text {number}" for number in range(2000))))
    (tmp_path / f"a.jsonl.{ending}").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=f"a.jsonl.{ending}: cut short"):
        list(read_documents(jsonl(f"a.jsonl.{ending}"), tmp_path))


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(tmp_path, ending):
    (tmp_path / f"a.jsonl.{ending}").write_bytes(lines("plain"))
    with pytest.raises(DataError, match=f"a.jsonl.{ending}: cannot be read"):
        list(read_documents(jsonl(f"a.jsonl.{ending}"), tmp_path))


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"a.txt: not valid UTF-8 at byte 3"):
        list(read_documents(TextSource(kind="text", path="a.txt"), tmp_path))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("body", ["x"], "no column 'text'; it has 'body'"),
        ("text", [1], "column 'text' must hold strings, not int64"),
        ("text", ["x", None], "record 2: column 'text' is null"),
    ],
)
def test_bad_parquet_content_is_named(tmp_path, column, values, message):
    pq.write_table(pa.table({column: values}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        list(read_documents(ParquetSource(kind="parquet", path="a.parquet"), tmp_path))


def test_a_parquet_file_that_was_cut_short_is_refused(tmp_path):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a.parquet: cannot be read as Parquet"):
        list(read_documents(ParquetSource(kind="parquet", path="a.parquet"), tmp_path))
