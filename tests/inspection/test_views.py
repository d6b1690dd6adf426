"""Rows, documents and records as they are shown."""

import json
from pathlib import Path

import numpy as np
import pytest

from inspection_factory import TEXTS, byte_tokenizer, save_rows, save_run
from unspool.core.errors import ConfigError, DataError
from unspool.data.packing.row import Row
from unspool.data.tokenize.encoder import build_encoder
from unspool.inspection.detokenize import FoundTokenizer, find_tokenizer
from unspool.inspection.input_documents import Corpus, Records
from unspool.inspection.items import Item, Part, Show, choose_indices
from unspool.inspection.packed_rows import Rows
from unspool.inspection.run_paths import find_data

ALL = Show()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "small")


def read_by(place_path: Path, given: str | None = None) -> FoundTokenizer:
    place = find_data(place_path)
    root = place.run_dir or Path()
    return find_tokenizer(place, given, lambda name: str(root / name))


def opened(folder: Path) -> Rows:
    return Rows(find_data(folder), read_by(folder))


def text_of(part: Part) -> str:
    return "".join(span.text for span in part.spans)


def text_with(item: Item, role: str) -> str:
    return " ".join(span.text for part in item.parts for span in part.spans if span.role == role)


# Rows


def test_rows_show_every_token_and_a_character_cut_by_a_row_as_replacements(run_dir):
    rows = opened(run_dir / "datasets" / "short")
    shown = [[text_of(part) for part in rows.item(index, ALL).parts] for index in range(len(rows))]
    decoder = read_by(run_dir / "datasets" / "short").decoder
    assert decoder is not None
    assert shown == [
        [decoder.text(doc) for doc in np.split(row.tokens, np.cumsum(row.doc_lens)[:-1])]
        for row in map(rows.row, range(len(rows)))
    ]
    whole = "".join(text for texts in shown for text in texts)
    assert whole.startswith("the river runs past the old mill<|end|>")
    assert "\ufffd" in whole, "no row ends within a character, so nothing was shown of it"


def test_a_document_that_continues_in_the_next_row_is_called_cut_at_both_ends(run_dir):
    rows = opened(run_dir / "datasets" / "short")
    items = [rows.item(index, ALL) for index in range(len(rows))]
    firsts = [item.parts[0].facts for item in items]
    ends = [item.parts[-1].facts for item in items]
    assert "cut at the start" not in firsts[0]
    for before, after in zip(ends, firsts[1:], strict=False):
        assert ("cut at the end" in before) == ("cut at the start" in after)
    assert any("cut at the start" in facts for facts in firsts)
    inner = [part.facts for item in items for part in item.parts[1:-1]]
    assert [facts for facts in inner if facts] == []


def test_with_bos_a_missing_beginning_is_a_cut_under_any_packing(tmp_path):
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (doc,) = build_encoder(tokenizer).encode(["日本語 and the river"])
    assert len(doc) > 12
    rows = [
        Row(part, np.array([4], dtype=np.int32), None, "books", "intra_document")
        for part in (doc[:4], doc[4:8], doc[-4:])
    ]
    folder = save_rows(tmp_path / "rows", rows, packing="single_doc")
    shown = Rows(find_data(folder), read_by(folder, str(tmp_path / "tokenizer")))
    facts = [shown.item(index, ALL).parts[0].facts for index in range(3)]
    assert facts == [["cut at the end"], ["cut at the start", "cut at the end"], ["cut at the start"]]


def test_the_share_of_tokens_with_loss_counts_prediction_targets(tmp_path):
    mask = np.array([1, 0, 0, 1, 1, 1, 1, 1], dtype=np.bool_)
    row = Row(np.arange(8, dtype=np.uint32), np.array([5, 3], dtype=np.int32), mask, "books", "intra_document")
    item = opened(save_rows(tmp_path / "rows", [row])).item(0, ALL)
    # Not targets: the first token of each document, and the two masked tokens.
    assert "loss on 50.0% of tokens" in item.facts
    assert [span.loss for part in item.parts for span in part.spans] == [False] * 3 + [True] * 2 + [False] + [True] * 2


def test_padding_is_not_a_document(tmp_path):
    mask = np.array([1] * 6 + [0] * 2, dtype=np.bool_)
    row = Row(np.arange(8, dtype=np.uint32), np.array([6, 2], dtype=np.int32), mask, "books", "intra_document")
    rows = opened(save_rows(tmp_path / "rows", [row], packing="best_fit"))
    item = rows.item(0, ALL)
    assert [part.title for part in item.parts] == ["document 1 of 1", "padding"]
    assert "2 tokens of padding" in item.facts
    assert rows.summary().lengths.tolist() == [6]


def test_a_tangled_row_tells_its_parts_labels_and_solution(run_dir):
    item = opened(run_dir / "datasets" / "tangled").item(0, ALL)
    assert [part.title for part in item.parts] == ["piece 1 of 3", "piece 2 of 3", "piece 3 of 3"]
    assert item.parts[0].facts == ["part 1 of 2 of document 1", "label Ab12Cd"]
    assert item.parts[1].facts == ["not split"]
    assert item.parts[2].facts == [
        "part 2 of 2 of document 1",
        "label Xy34Zw",
        "ends with the solution Ab12Cd Xy34Zw",
    ]
    assert [part.group for part in item.parts] == [0, 1, 0]
    assert text_with(item, "label") == "Ab12Cd Xy34Zw Ab12Cd Xy34Zw"
    assert "<|knot:S|>" in text_with(item, "knot")
    silent = [span.text for span in item.parts[0].spans if not span.loss]
    assert silent[:3] == ["<|knot:D|>", "Ab12Cd", "<|knot:/D|>"]


def test_rows_are_chosen_by_source(tmp_path):
    def row(source: str) -> Row:
        return Row(np.arange(4, dtype=np.uint32), np.array([4], dtype=np.int32), None, source, "intra_document")

    rows = opened(save_rows(tmp_path / "rows", [row("books"), row("wiki"), row("books+wiki"), row("books")]))
    assert rows.pick(indices=[], count=9, seed=0, source="wiki") == [1, 2]
    with pytest.raises(ConfigError, match="did you mean 'wiki'"):
        rows.pick(indices=[], count=9, seed=0, source="wikis")
    with pytest.raises(ConfigError, match="row 0 contains nothing from 'wiki', only books"):
        rows.pick(indices=[0], count=9, seed=0, source="wiki")


@pytest.mark.parametrize("index", [-1, 3])
def test_an_index_out_of_range_is_refused(index, run_dir):
    corpus = Corpus(find_data(run_dir / "corpus" / "books"), FoundTokenizer())
    with pytest.raises(ConfigError, match=f"`index={index}`: there are 3 documents, 0 to 2"):
        corpus.pick(indices=[index], count=1, seed=0, source=None)


def test_the_first_and_some_others_are_chosen_the_same_for_the_same_seed():
    chosen = choose_indices(range(1000), 5, 0)
    assert chosen == choose_indices(range(1000), 5, 0)
    assert chosen != choose_indices(range(1000), 5, 1)
    assert (chosen[0], len(set(chosen)), sorted(chosen)) == (0, 5, chosen)
    assert choose_indices(range(3), 9, 0) == [0, 1, 2]
    assert choose_indices(range(0), 3, 0) == []


# Documents


def test_a_document_reads_as_its_text_and_its_end(run_dir):
    corpus = Corpus(find_data(run_dir / "corpus" / "books"), read_by(run_dir / "corpus" / "books"))
    for index, text in enumerate(TEXTS):
        (part,) = corpus.item(index, ALL).parts
        assert text_of(part) == text + "<|end|>"
        assert part.title == f"books.jsonl:{index + 1}"


def test_the_middle_of_a_long_document_is_hidden_and_counted(run_dir):
    corpus = Corpus(find_data(run_dir / "corpus" / "books"), read_by(run_dir / "corpus" / "books"))
    (part,) = corpus.item(0, Show(head=3, tail=2)).parts
    (hidden,) = [span.text for span in part.spans if span.role == "hidden"]
    assert hidden == f"{part.length - 5:,} tokens hidden"
    assert TEXTS[0].startswith(part.spans[0].text)


def test_leaving_out_never_splits_a_character(run_dir):
    corpus = Corpus(find_data(run_dir / "corpus" / "books"), read_by(run_dir / "corpus" / "books"))
    for head in range(1, 9):
        (part,) = corpus.item(1, Show(head=head, tail=2)).parts
        assert "\ufffd" not in text_of(part)


def test_tokens_are_shown_one_by_one_with_their_ids(run_dir):
    corpus = Corpus(find_data(run_dir / "corpus" / "books"), read_by(run_dir / "corpus" / "books"))
    (part,) = corpus.item(1, Show(tokens=True)).parts
    assert len(part.spans) == part.length
    assert part.spans[0].text == "\\xe6"
    assert part.spans[-1].text == "<|end|>"


def test_without_a_tokenizer_ids_are_shown_with_a_remedy(run_dir):
    folder = run_dir / "corpus" / "books"
    place = find_data(folder)
    found_tokenizer = find_tokenizer(place, None, lambda name: str(folder / "nowhere"))
    assert found_tokenizer.decoder is None
    assert "give a tokenizer" in found_tokenizer.notes[0]
    (part,) = Corpus(place, found_tokenizer).item(0, ALL).parts
    assert [len(span.ids) for span in part.spans] == [1] * part.length


def test_another_requested_tokenizer_is_used_with_a_note(run_dir, tmp_path):
    byte_tokenizer(bos=True).save_pretrained(tmp_path / "other")
    assert read_by(run_dir / "corpus" / "books").notes == []
    other = read_by(run_dir / "corpus" / "books", str(tmp_path / "other"))
    assert "differs from the one in the manifest" in other.notes[0]


def test_of_several_tokenizers_the_recorded_one_is_taken(tmp_path):
    run_dir = save_run(tmp_path / "run")
    (run_dir / "model").rename(run_dir / "moved")
    byte_tokenizer(bos=True).save_pretrained(run_dir / "stages" / "a" / "model")
    byte_tokenizer().save_pretrained(run_dir / "stages" / "b" / "model")
    found_tokenizer = read_by(run_dir / "datasets" / "short")
    assert (found_tokenizer.name, found_tokenizer.notes) == (str(run_dir / "stages" / "b" / "model"), [])


# Input files


def records_of(path: Path, found_tokenizer: FoundTokenizer | None = None, field: str | None = None) -> Records:
    return Records(find_data(path), found_tokenizer or FoundTokenizer(), field=field, seed=0)


def test_an_input_file_shows_what_a_source_would_keep_and_quarantine(tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text(json.dumps({"text": "the mill"}) + "\n{broken\n" + json.dumps({"text": ""}) + "\n")
    records = records_of(path)
    assert records.pick(indices=[], count=9, seed=0, source=None) == [0, 1, 2]
    items = [records.item(index, ALL) for index in range(3)]
    assert text_of(items[0].parts[0]) == "the mill"
    assert text_of(items[1].parts[0]).startswith("broken_json: ")
    assert (items[1].facts, text_of(items[2].parts[0])) == (["line 2", "cannot be read"], "empty")
    assert records.summary().headline == "3 records"


def test_only_as_many_records_are_read_as_are_shown(tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps({"body": f"number {number}"}) + "\n" for number in range(9)))
    records = records_of(path, field="body")
    assert records.pick(indices=[], count=2, seed=0, source=None) == [0, 1]
    assert records.summary().headline == "the first 2 records"
    with pytest.raises(ConfigError, match=r"`index=12`: .* has only 9 records"):
        records.pick(indices=[12], count=1, seed=0, source=None)


def test_a_text_file_with_a_tokenizer_is_shown_as_tokens(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "book.txt"
    path.write_text("the old mill")
    records = records_of(path, read_by(path, str(tmp_path / "tokenizer")))
    records.pick(indices=[], count=1, seed=0, source=None)
    (part,) = records.item(0, Show(tokens=True)).parts
    assert part.unit == "tokens"
    assert "".join(span.text for span in part.spans) == "the␣old␣mill<|end|>"


# What cannot be looked at


def test_a_wrong_name_suggests_the_nearest(run_dir):
    with pytest.raises(ConfigError, match=r"no such file or folder; did you mean .*datasets/tangled"):
        find_data(run_dir / "datasets" / "tangeld")


def test_an_empty_folder_and_one_with_other_things_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="the folder is empty"):
        find_data(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ConfigError, match="no documents or rows found"):
        find_data(tmp_path)
    (tmp_path / "data.arrow").write_text("x")
    with pytest.raises(ConfigError, match=r"rows-\*.arrow or docs-\*.arrow"):
        find_data(tmp_path / "data.arrow")


@pytest.mark.parametrize("name", ["rows-00000.arrow", "docs-00000.arrow"])
@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"not arrow at all" * 10])
def test_a_broken_file_is_a_data_error(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    place = find_data(tmp_path)
    with pytest.raises(DataError, match=name):
        Rows(place, FoundTokenizer()) if place.kind == "dataset" else Corpus(place, FoundTokenizer())


def test_arrow_files_of_others_are_a_data_error(run_dir, tmp_path):
    (tmp_path / "rows-00000.arrow").write_bytes((run_dir / "corpus" / "books" / "docs-00000.arrow").read_bytes())
    with pytest.raises(DataError, match="are not a dataset of unspool"):
        Rows(find_data(tmp_path), FoundTokenizer())
    (tmp_path / "rows-00000.arrow").rename(tmp_path / "docs-00000.arrow")
    (tmp_path / "docs-00000.arrow").write_bytes((run_dir / "datasets" / "short" / "rows-00000.arrow").read_bytes())
    with pytest.raises(DataError, match="are not a corpus of unspool"):
        Corpus(find_data(tmp_path), FoundTokenizer())


def test_truncated_files_never_cause_a_traceback(run_dir, tmp_path):
    data = (run_dir / "datasets" / "short" / "rows-00000.arrow").read_bytes()
    path = tmp_path / "rows-00000.arrow"
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(DataError):
            Rows(find_data(path), FoundTokenizer())


def test_flipped_bits_end_in_a_data_error_or_in_other_tokens(run_dir, tmp_path):
    rng = np.random.default_rng(0)
    refused = 0
    for box, name in (("datasets/tangled", "rows-00000.arrow"), ("corpus/books", "docs-00000.arrow")):
        data = (run_dir / box / name).read_bytes()
        found_tokenizer = read_by(run_dir / box)
        for at in rng.choice(len(data), size=60, replace=False).tolist():
            # A new file each time: the one before may still be mapped.
            folder = tmp_path / f"{name}-{at}"
            folder.mkdir()
            (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            place = find_data(folder)
            try:
                collection = Rows(place, found_tokenizer) if place.kind == "dataset" else Corpus(place, found_tokenizer)
                collection.summary()
                collection.item(0, ALL)
            except DataError:
                refused += 1
    assert refused > 20


def test_rows_whose_documents_do_not_add_up_are_a_data_error(run_dir, tmp_path):
    path = tmp_path / "rows-00000.arrow"
    data = (run_dir / "datasets" / "tangled" / "rows-00000.arrow").read_bytes()
    lens = opened(run_dir / "datasets" / "tangled").row(0).doc_lens
    assert data.count(lens.tobytes()) == 1
    path.write_bytes(data.replace(lens.tobytes(), (lens + 1).tobytes()))
    with pytest.raises(DataError, match="row 0: document lengths do not add up"):
        Rows(find_data(path), FoundTokenizer()).summary()
