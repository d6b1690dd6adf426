"""Pieces of rows: whose they are, by which number, at which positions."""

from pathlib import Path

import numpy as np
import pytest

from inspection_factory import byte_tokenizer, pieced_row, save_rows, tangled_row
from unspool.inspection.detokenize import FoundTokenizer, find_tokenizer
from unspool.inspection.items import Item, Show
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import find_data
from unspool.inspection.utk_chunks import documents_of, position_fact

CIP = {"cip": {"pieces": 2}, "packing": "concat"}


def shown(folder: Path, found_tokenizer: FoundTokenizer | None = None) -> Item:
    return Rows(find_data(folder), found_tokenizer or FoundTokenizer()).item(0, Show())


def test_pieces_of_interleaved_rows_are_joined_by_what_the_row_records(tmp_path):
    item = shown(save_rows(tmp_path / "rows", [pieced_row([3, 4, 3, 4, 2], [7, 5, 7, 5, 9])], **CIP))
    assert [part.group for part in item.parts] == [0, 1, 0, 1, 2]
    assert [part.title for part in item.parts][:2] == ["piece 1 of 5", "piece 2 of 5"]
    assert [part.facts for part in item.parts] == [
        ["part 1 of 2 of document 1"],
        ["part 1 of 2 of document 2"],
        ["part 2 of 2 of document 1"],
        ["part 2 of 2 of document 2"],
        ["the only piece of document 3 here"],
    ]
    assert "5 pieces of 3 documents" in item.facts


@pytest.mark.parametrize(
    "settings", [{"nextlong": {"chunk": 2048}}, {"utk": {"preserve_order": False}}], ids=["negatives", "tangle"]
)
def test_parts_are_not_numbered_where_the_row_does_not_keep_their_order(settings, tmp_path):
    item = shown(save_rows(tmp_path / "rows", [pieced_row([3, 4, 3], [0, 1, 0])], **settings))
    assert item.parts[0].facts == ["document 1, 1 of 2 here"]
    assert item.parts[2].facts == ["document 1, 2 of 2 here"]


def test_recorded_pieces_have_priority_over_solutions(tmp_path):
    """A document without a solution, as one that is cut, is known all the same; knots give its parts' numbers."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    row = tangled_row(byte_tokenizer())
    recorded = pieced_row(row.doc_lens.tolist(), [4, 2, 4], tokens=row.tokens, loss_mask=row.loss_mask)
    folder = save_rows(tmp_path / "rows", [recorded], utk={"preserve_order": False})
    found_tokenizer = find_tokenizer(find_data(folder), str(tmp_path / "tokenizer"), str)
    item = shown(folder, found_tokenizer)
    assert [part.facts for part in item.parts] == [
        ["part 1 of 2 of document 1", "label Ab12Cd"],
        ["the only piece of document 2 here"],
        ["part 2 of 2 of document 1", "label Xy34Zw", "ends with the solution Ab12Cd Xy34Zw"],
    ]


def test_documents_are_numbered_as_they_appear():
    assert documents_of(np.array([8, 3, 8, 0])) == [0, 1, 0, 2]


def test_skipped_positions_are_shown_per_document(tmp_path):
    positions = np.array([0, 1, 2, 90, 91, 0, 1, 40], dtype=np.int32)
    row = pieced_row([5, 3], [0, 1], positions=positions, attention="intra_document", chunk_ids=None)
    item = shown(save_rows(tmp_path / "rows", [row], pose={"target": 128}, packing="concat"))
    assert [part.facts for part in item.parts] == [["positions 0–2, then 90–91"], ["positions 0–1, then 40"]]
    assert "positions up to 91" in item.facts
    facts = dict(Rows(find_data(tmp_path / "rows"), FoundTokenizer()).summary().facts)
    assert facts["packing"] == "concat, positions skipped up to 128"


def test_many_stretches_are_counted_and_not_listed():
    assert position_fact(np.arange(0, 6000, 1000)) == (
        "positions 0, then 1,000, then 2,000, then 3,000, then 2 more ranges"
    )
