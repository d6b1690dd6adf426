"""Distances of datasets: which tokens count as text, the notes, and the drawings."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np

from inspection_factory import byte_tokenizer, pieced_row, save_rows, tangled_row
from unspool.core.charts import decades
from unspool.core.console import PlainConsole
from unspool.core.formatting import format_share
from unspool.data.distances import doublings
from unspool.data.packing.row import Row
from unspool.inspection.detokenize import FoundTokenizer, find_tokenizer
from unspool.inspection.distance_view import (
    Distances,
    bin_names,
    count_distances,
    distance_tables,
    distance_values,
    draw_tails,
    print_distances,
    read_text,
    render_distances,
    unique_names,
)
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import find_data

CIP = {"cip": {"pieces": 2}, "packing": "concat"}


def counted(
    folder: Path,
    beyond: tuple[int, ...] = (),
    *,
    tokenizer: FoundTokenizer | None = None,
    rows: int | None = None,
) -> Distances:
    text = read_text(Rows(find_data(folder), tokenizer or FoundTokenizer()), folder.name, most_rows=rows)
    return count_distances(text, doublings(text.reach), beyond)


def test_interleaving_moves_pairs_apart_and_keeps_their_number(tmp_path):
    plain = Row(np.zeros(16, np.uint32), np.array([8, 8], np.int32), None, "books", "intra_document")
    before = counted(save_rows(tmp_path / "plain", [plain], packing="concat"), (8,))
    after = counted(save_rows(tmp_path / "cip", [pieced_row([4, 4, 4, 4], [0, 1, 0, 1])], **CIP), (8,))
    assert (before.total, after.total) == (56, 56)
    assert (before.beyond[8], after.beyond[8]) == (0, 20)
    assert after.edges == [1, 2, 4, 8]
    assert sum(after.pairs) == after.total


def test_marks_are_no_text_and_pieces_of_a_document_are_one(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    row = tangled_row(byte_tokenizer())
    recorded = pieced_row(row.doc_lens.tolist(), [0, 1, 0], tokens=row.tokens, loss_mask=row.loss_mask)
    folder = save_rows(tmp_path / "rows", [recorded], utk={"preserve_order": True})
    tokenizer = find_tokenizer(find_data(folder), str(tmp_path / "tokenizer"), str)
    assert tokenizer.decoder is not None
    texts = [tokenizer.encoder.encode_plain([text])[0] for text in ("the river runs past", " the old mill")]  # type: ignore[union-attr]
    one = sum(map(len, texts)) + 1  # and EOS
    other = int(row.doc_lens[1])
    known = counted(folder, tokenizer=tokenizer)
    assert known.total == (one * (one - 1) + other * (other - 1)) // 2
    assert known.text.notes == []
    unknown = counted(folder)
    assert unknown.total > known.total
    assert "special tokens count as text" in unknown.text.notes[0]


def test_padding_is_not_text(tmp_path):
    mask = np.array([1] * 6 + [0] * 2, dtype=np.bool_)
    row = Row(np.arange(8, dtype=np.uint32), np.array([6, 2], dtype=np.int32), mask, "books", "intra_document")
    assert counted(save_rows(tmp_path / "rows", [row], packing="best_fit")).total == 15


def test_skipped_positions_count_as_distances_with_a_note(tmp_path):
    row = pieced_row([4], [0], positions=np.array([0, 1, 100, 101], np.int32))
    each = counted(save_rows(tmp_path / "rows", [row], pose={"target": 128}), (64,))
    assert each.beyond[64] == 4
    assert each.edges[-1] == 64
    assert "differences of position ids" in each.text.notes[0]


def test_a_sample_of_rows_is_evenly_spaced_and_noted(tmp_path):
    lens = [[8], [8], [8], [4, 4], [8]]
    rows = [Row(np.zeros(8, np.uint32), np.array(each, np.int32), None, "books", "intra_document") for each in lens]
    folder = save_rows(tmp_path / "rows", rows, packing="concat")
    some = counted(folder, rows=3)
    assert (some.total, some.text.counted) == (84, 3)
    assert some.text.notes == ["counted in 3 of 5 rows, evenly spaced"]
    assert counted(folder).per_row(counted(folder).total) == (4 * 28 + 12) / 5


def test_rows_that_do_not_record_their_pieces_say_so(tmp_path):
    row = Row(np.zeros(8, np.uint32), np.array([4, 4], np.int32), None, "books", "full")
    notes = counted(save_rows(tmp_path / "rows", [row], **CIP)).text.notes
    assert "does not record which pieces belong together" in notes[0]


def test_a_share_of_nothing_is_unknown_and_a_small_one_is_not_nothing(tmp_path):
    row = Row(np.zeros(2, np.uint32), np.array([1, 1], np.int32), None, "books", "intra_document")
    each = counted(save_rows(tmp_path / "rows", [row], packing="concat"))
    assert each.share(0) is None
    assert [format_share(share) for share in (None, 0.0, 0.00004, 0.0123, 1.0)] == [
        "–",
        "0.0%",
        "<0.01%",
        "1.2%",
        "100.0%",
    ]
    assert distance_values(each, [])["bins"][0]["share"] is None


def test_bins_and_names():
    assert doublings(33) == [1, 2, 4, 8, 16, 32]
    assert doublings(32) == [1, 2, 4, 8, 16]
    assert doublings(1) == [1]
    assert bin_names([1, 1024, 2048], 4096) == ["1–1K", "1K–2K", "2K–4K"]
    assert bin_names([1, 1024], 4096) == ["1–1K", "1K and more"]
    assert unique_names([Path("a/rows/x"), Path("a/rows/y")]) == ["x", "y"]
    assert unique_names([Path("a/rows/x"), Path("b/rows/x")]) == ["a/rows/x", "b/rows/x"]
    assert unique_names([Path("a/x"), Path("a/x")]) == ["x", "x"]


def test_the_tables_hold_every_bin_what_is_beyond_and_the_sum(tmp_path):
    each = counted(save_rows(tmp_path / "cip", [pieced_row([4, 4, 4, 4], [0, 1, 0, 1])], **CIP), (4,))
    shares, per_row = distance_tables([each], [4])
    assert [row[0].text for row in shares.body] == ["1–2", "2–4", "4–8", "8–16"]
    totals = [[entry.text for entry in row] for row in shares.totals]
    assert totals == [["4 and more", "57.1%"], ["8 and more (half a row)", "35.7%"]]
    assert [entry.text for entry in per_row.totals[-1]] == ["all", "56"]


def test_the_page_draws_a_curve_and_a_marker_of_its_own_for_each_set_and_escapes_names(tmp_path):
    sets = [
        counted(save_rows(tmp_path / name, [pieced_row([4, 4, 4, 4], [0, 1, 0, 1])], **CIP)) for name in ("<b>a", "b")
    ]
    page = render_distances(sets, [4])
    assert page.count('<g class="m0">') == 3  # two charts and the key
    assert page.count('<g class="m1">') == 3
    assert page.count('<polyline class="line"') == 4
    assert page.count('<circle class="dot"') == page.count('<polygon class="dot"') > 4
    assert "<b>a" not in page
    assert "&lt;b&gt;a" in page
    assert "<script" not in page


def test_decades_surround_the_values():
    assert decades(3, 2000) == [1, 10, 100, 1000, 10000]
    assert decades(1, 1) == [1, 10]
    assert len(decades(1e-3, 1e15)) <= 9


def test_a_curve_has_a_gap_where_no_pair_is_so_far_apart(tmp_path):
    near = counted(save_rows(tmp_path / "near", [pieced_row([4] * 4, [0, 1, 2, 3])], **CIP))
    far = counted(save_rows(tmp_path / "far", [pieced_row([4, 4, 4, 4], [0, 1, 0, 1])], **CIP))
    texts = (near.text, far.text)
    both = [count_distances(text, doublings(far.text.reach), []) for text in texts]
    tails = draw_tails(both)
    dots = [len(re.findall('class="dot"', part)) for part in tails.split('<g class="m')[1:]]
    assert dots == [2, 4]
    assert draw_tails([replace(both[0], beyond=dict.fromkeys(both[0].beyond, 0))]) == ""


def test_columns_that_do_not_fit_are_printed_below(tmp_path):
    names = [f"set-{number}" for number in range(6)]
    rows = [pieced_row([4, 4, 4, 4], [0, 1, 0, 1])]
    sets = [counted(save_rows(tmp_path / name, rows, **CIP)) for name in names]
    out = StringIO()
    print_distances(PlainConsole(file=out, width=50), sets, [])
    heads = [line.split() for line in out.getvalue().splitlines() if line.startswith("share of pairs")]
    assert [head[3:] for head in heads] == [names[:3], names[3:]]
    assert max(map(len, out.getvalue().splitlines())) <= 55
