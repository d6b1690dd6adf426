"""What a summary of packed rows counts: documents, or the parts of documents that packing has cut."""

from pathlib import Path

import pytest

import unspool
from unspool.inspection import packed_rows

SHORT = "The ship went on. "


def pack(folder: Path, packing: str, *counts: int) -> unspool.PackedDataset:
    _, tokenizer = unspool.load("asset:tiny-base", device="cpu")
    return unspool.pack([SHORT * count for count in counts], tokenizer, seq_len=64, packing=packing, out=folder)


def lines_of(folder: Path) -> list[str]:
    return str(unspool.inspect(folder, count=1)).splitlines()


def parts_in(dataset: unspool.PackedDataset) -> int:
    return sum(len(row.doc_lens) for row in dataset)


@pytest.mark.parametrize("packing", ["concat", "single_doc"])
def test_parts_of_cut_documents_are_counted_beside_the_documents_that_pack_counts(tmp_path, packing):
    dataset = pack(tmp_path / "rows", packing, 30, 60, 90)
    parts, documents = parts_in(dataset), dataset.stats()["documents"]
    assert parts > documents == 3

    (line,) = [line for line in lines_of(tmp_path / "rows") if line.startswith("document parts: ")]
    assert line.startswith(f"document parts: {parts} of 3 documents, median ")
    assert not any(line.startswith("documents: ") for line in lines_of(tmp_path / "rows"))
    (found,) = unspool.inspect(tmp_path / "rows", count=1).to_dict()
    assert (found["lengths_of"], found["documents"]) == ("document part", 3)


def test_whole_documents_are_called_documents(tmp_path):
    dataset = pack(tmp_path / "rows", "best_fit", 2, 4, 8)
    assert dataset.stats()["documents"] == 3 and dataset.stats()["padding"] > 0

    assert any(line.startswith("documents: 3, median ") for line in lines_of(tmp_path / "rows"))


def test_a_page_names_the_parts(tmp_path):
    parts = parts_in(pack(tmp_path / "rows", "concat", 30, 60, 90))
    page = tmp_path / "page.html"
    unspool.inspect(tmp_path / "rows", count=1).save(page, "html")

    text = page.read_text(encoding="utf-8")
    assert f"of {parts} document parts of 3 documents" in text and "share of document parts" in text


def test_of_a_sample_of_rows_only_the_parts_are_counted(tmp_path, monkeypatch):
    dataset = pack(tmp_path / "rows", "concat", 30, 60, 90)
    monkeypatch.setattr(packed_rows, "MAX_SCANNED", 2)

    (line,) = [line for line in lines_of(tmp_path / "rows") if line.startswith("document parts: ")]
    assert "documents" not in line and f"of {len(dataset)}" not in line and "rows, evenly spaced" in line
