import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from unspool.core.errors import ConfigError
from unspool.data.sources.base import Bad, Document, Filtered
from unspool.data.sources.textbooks import TextbooksSource


def source(**fields) -> TextbooksSource:
    return TextbooksSource(kind="textbooks", path=".", **fields)


def chapter(book: str, number: object, text: str, subject: str = "physics") -> dict[str, object]:
    return {"subject": subject, "book": book, "chapter": number, "text": text}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(*paths: Path, seed: int = 0, **fields):
    return list(source(**fields).read_units(paths, seed))


def texts(*paths: Path, seed: int = 0, **fields) -> list[str]:
    return [item.text for item in read(*paths, seed=seed, **fields) if isinstance(item, Document)]


def test_chapters_become_books_and_books_subjects(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        chapter("Optics", 2, "o2"),
        chapter("Optics", 1, "o1"),
        chapter("Cells", 1, "c1", subject="biology"),
        chapter("Heat", 1, "h1\n"),
    )
    optics, heat = "# Optics\n\no1\n\no2\n", "# Heat\n\nh1\n"
    biology, physics = texts(path)
    assert biology == "# Cells\n\nc1\n"
    assert physics in (optics + "\n" + heat, heat + "\n" + optics)
    assert texts(path, subject=None) == [optics, "# Cells\n\nc1\n", heat]


def test_every_record_is_counted_once(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        chapter("Optics", 2, "o2"),
        chapter("Optics", 1, "o1"),
        chapter("Optics", 3, " \n"),
        {"subject": "physics", "book": "Optics"},
        chapter("Cells", 1, "c1", subject="biology"),
    )
    assert read(path) == [
        Filtered("a.jsonl:1", "joined"),
        Document("a.jsonl:2", "# Optics\n\no1\n\no2\n"),
        Filtered("a.jsonl:3", "empty"),
        Bad(str(path), "line 4", "missing_field", "no field 'text'; it has 'subject', 'book'"),
        Document("a.jsonl:5", "# Cells\n\nc1\n"),
    ]


@pytest.mark.parametrize(
    "numbers",
    [
        [1, 2, 10, 11],
        ["1", "2", "10", "11"],
        [1, 1.5, 1.75, 2],
        ["Chapter 1", "chapter 2", "Chapter 10", "chapter 11"],
        ["1.2", "1.10", "2.1", "10"],
        [1, "2", 3, "10"],
        [-1, 0, "1", "9" * 5000],
        [-1, 1, 1.5, 10**400],
        ["1", "2", "Appendix A", "Appendix B"],
    ],
)
def test_chapters_are_in_natural_order(tmp_path, numbers):
    records = [chapter("Optics", number, f"text {place}") for place, number in enumerate(numbers)]
    shuffled = [records[2], records[0], records[3], records[1]]
    assert texts(write(tmp_path / "a.jsonl", *shuffled)) == ["# Optics\n\ntext 0\n\ntext 1\n\ntext 2\n\ntext 3\n"]


@pytest.mark.parametrize("missing", [None, "", True, [1], float("nan")])
def test_a_book_with_a_chapter_that_has_no_number_keeps_its_order(tmp_path, missing):
    path = write(
        tmp_path / "a.jsonl", chapter("Optics", 3, "x"), chapter("Optics", missing, "y"), chapter("Optics", 1, "z")
    )
    assert texts(path) == ["# Optics\n\nx\n\ny\n\nz\n"]


def test_chapters_keep_their_order_without_a_field_or_with_equal_numbers(tmp_path):
    path = write(tmp_path / "a.jsonl", chapter("Optics", 2, "x"), chapter("Optics", 1, "y"))
    assert texts(path, chapter=None) == ["# Optics\n\nx\n\ny\n"]
    path = write(tmp_path / "a.jsonl", chapter("Optics", 2, "y"), chapter("Optics", 2, "x"))
    assert texts(path) == ["# Optics\n\ny\n\nx\n"]


def test_the_order_of_books_depends_on_the_seed_and_not_on_the_file(tmp_path):
    records = [chapter(f"Book {number}", 1, f"text {number}") for number in range(8)]
    path = write(tmp_path / "a.jsonl", *records)
    other = write(tmp_path / "b.jsonl", *reversed(records))
    orders = [texts(path, seed=seed) for seed in range(4)]
    assert len({order[0] for order in orders}) == 4
    assert orders == [texts(other, seed=seed) for seed in range(4)]


def test_chapters_are_joined_across_files(tmp_path):
    first = write(tmp_path / "a.jsonl", chapter("Optics", 2, "o2"))
    second = write(tmp_path / "b.jsonl", chapter("Optics", 1, "o1"))
    assert read(first, second) == [Filtered("a.jsonl:1", "joined"), Document("b.jsonl:1", "# Optics\n\no1\n\no2\n")]


def test_books_of_the_same_title_in_two_subjects_stay_apart(tmp_path):
    path = write(
        tmp_path / "a.jsonl", chapter("Introduction", 1, "p"), chapter("Introduction", 2, "b", subject="biology")
    )
    assert texts(path) == ["# Introduction\n\np\n", "# Introduction\n\nb\n"]


def test_fields_may_have_other_names(tmp_path):
    path = write(tmp_path / "a.jsonl", {"t": "x", "b": "Optics", "s": "physics", "c": 1})
    assert texts(path, text="t", book="b", subject="s", chapter="c") == ["# Optics\n\nx\n"]


def test_a_title_is_one_line(tmp_path):
    assert texts(write(tmp_path / "a.jsonl", chapter("Optics\n of light ", 1, "x"))) == ["# Optics of light\n\nx\n"]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_plain_and_compressed_files_read_the_same(tmp_path, ending):
    data = write(tmp_path / "plain", chapter("Optics", 2, "o2"), chapter("Optics", 1, "o1")).read_bytes()
    pack = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[ending]
    (tmp_path / f"a.{ending}").write_bytes(pack(data))
    (path,) = source().units(tmp_path)
    assert texts(path) == ["# Optics\n\no1\n\no2\n"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "caf\xe9", "book": "b", "subject": "s"}', "invalid_utf8"),
        (b'{"text": "x", ', "broken_json"),
        (b"[1]", "not_an_object"),
        (b'{"text": "x", "subject": "s"}', "missing_field"),
        (b'{"text": "x", "book": "b"}', "missing_field"),
        (b'{"text": 1, "book": "b", "subject": "s"}', "not_text"),
        (b'{"text": "x", "book": null, "subject": "s"}', "not_text"),
        (b'{"text": "x\\u0000", "book": "b", "subject": "s"}', "nul"),
        (b'{"text": "x", "book": "b", "subject": "\\ud800"}', "surrogate"),
    ],
)
def test_a_bad_record_is_set_aside_and_the_rest_is_joined(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", chapter("Optics", 1, "o1"))
    good = path.read_bytes()
    path.write_bytes(good + line + b"\n\n" + good)
    bad, joined, document = read(path)
    assert (bad.record, bad.reason) == ("line 2", reason)
    assert joined == Filtered("a.jsonl:4", "joined")
    assert document == Document("a.jsonl:1", "# Optics\n\no1\n\no1\n")


def test_a_truncated_file_gives_its_records_and_one_bad_record(tmp_path):
    records = [chapter("Optics", number, f"text {number} " * 2000) for number in range(400)]
    data = gzip.compress(write(tmp_path / "plain", *records).read_bytes())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    *joined, document, bad = sorted(
        read(path), key=lambda item: ["Filtered", "Document", "Bad"].index(type(item).__name__)
    )
    assert (bad.reason, bad.record.split()[0]) == ("truncated", "after")
    assert len(joined) + 1 == int(bad.record.split()[-1])
    assert document.text.count("text 0 ") == 2000


def test_a_subject_is_handed_on_as_soon_as_it_is_complete(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        chapter("Optics", 1, "o1"),
        chapter("Optics", 2, "o2"),
        chapter("Cells", 1, "c1", subject="biology"),
        {"broken": True},
    )
    kinds = [type(item).__name__ for item in read(path)]
    assert kinds == ["Filtered", "Document", "Document", "Bad"]


def test_chapters_that_appear_between_the_two_readings_are_not_lost(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", chapter("Optics", 1, "o1"))
    found = TextbooksSource._read_chapters
    readings = []

    def growing(source, units):
        readings.append(1)
        if len(readings) == 2:
            write(
                path,
                chapter("Optics", 1, "o1"),
                chapter("Cells", 1, "c1", subject="biology"),
                chapter("Optics", 2, "o2"),
            )
        return found(source, units)

    monkeypatch.setattr(TextbooksSource, "_read_chapters", growing)
    assert sorted(texts(path)) == ["# Cells\n\nc1\n", "# Optics\n\no1\n", "# Optics\n\no2\n"]


def test_a_folder_without_jsonl_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kind textbooks"):
        source().units(tmp_path)


def test_parquet_with_the_columns_of_textbook_chapters_is_joined_by_the_folder_of_the_subject(tmp_path):
    columns = {
        "textbook_folder": ["books/bio/Cells", "books/phys/Optics", "books/bio/Cells", "books/bio/Plants", "flat"],
        "chapter": ["Cells 1", "Optics 1", "Cells 2", "Plants 1", "nowhere"],
        "url": ["u"] * 5,
    }
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "data/train-00000-of-00001.parquet")
    source = TextbooksSource(
        kind="textbooks",
        path="data",
        text="chapter",
        book="textbook_folder",
        subject="textbook_folder/1",
        chapter=None,
    )

    items = list(source.read_units(source.units(tmp_path)))

    texts = [item.text for item in items if isinstance(item, Document)]
    assert len(texts) == 2 and len(items) == 5
    biology = next(text for text in texts if "Plants 1" in text)
    assert "# books/bio/Cells\n\nCells 1\n\nCells 2\n" in biology and "Optics" not in biology
    (bad,) = (item for item in items if isinstance(item, Bad))
    assert (bad.record, bad.reason) == ("record 5", "missing_field") and "has no folder 1: 'flat'" in bad.detail
