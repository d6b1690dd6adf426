"""Datasets in the forms that `save_to_disk` and the Hub give them."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from unspool.core.errors import ConfigError, DataError
from unspool.data.sources.base import Document, Filtered

from .hf_folders import bad, card, names, read, save_to_disk, source, texts_of, write, write_stream

# Saved with save_to_disk


def test_a_saved_dataset_is_read_in_order(tmp_path):
    texts = [f"text {number}" for number in range(25)]
    save_to_disk(tmp_path, texts, num_files=3)

    items = read(tmp_path, source())

    assert texts_of(items) == texts
    assert isinstance(items[0], Document) and items[0].id == "data-00000-of-00003.arrow:1"


def test_a_saved_dictionary_of_splits_gives_the_requested_split(tmp_path):
    for split in ("train", "test"):
        save_to_disk(tmp_path / split, [f"of {split}"], split=split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    assert texts_of(read(tmp_path, source())) == ["of train"]
    assert texts_of(read(tmp_path, source(split="test"))) == ["of test"]
    with pytest.raises(ConfigError, match="no split 'dev'; set split to one of: 'train', 'test'"):
        source(split="dev").units(tmp_path)


def test_a_saved_split_is_not_confused_with_another(tmp_path):
    save_to_disk(tmp_path / "test", ["one"], split="test")
    save_to_disk(tmp_path / "part", ["two"], split="train[:1%]")

    with pytest.raises(ConfigError, match="no split 'train'; set split to one of: 'test'"):
        source("test").units(tmp_path)
    assert texts_of(read(tmp_path, source("part"))) == ["two"]


@pytest.mark.parametrize(
    "state",
    ["{", "[]", "{}", '{"_data_files": [{"filename": "../x.arrow"}]}', '{"_data_files": [{"filename": "gone.arrow"}]}'],
)
def test_an_incomplete_saved_dataset_is_refused(tmp_path, state):
    write(tmp_path / "x.arrow", "outside")
    save_to_disk(tmp_path / "saved", ["one"])
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json"):
        source("saved").units(tmp_path)


# Arrow


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary()])
def test_arrow_files_and_streams_of_any_text_type_are_read(tmp_path, kind):
    values = pa.array(["ä", "b" * 3000, "c"]).cast(pa.binary()).cast(kind)
    table = pa.table({"n": [1, 2, 3], "text": values})
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    write_stream(tmp_path / "stream.arrow", table.to_batches(max_chunksize=2))

    assert texts_of(read(tmp_path, source("file.arrow"))) == ["ä", "b" * 3000, "c"]
    assert texts_of(read(tmp_path, source("stream.arrow"))) == ["ä", "b" * 3000, "c"]


def test_dictionaries_and_struct_fields_of_arrow_files_are_read(tmp_path):
    batch = pa.record_batch(
        {"text": pa.array(["a", "b", "a"]).dictionary_encode(), "s": [{"t": "x"}, None, {"t": None}]}
    )
    write_stream(tmp_path / "a.arrow", [batch])

    assert texts_of(read(tmp_path, source("a.arrow"))) == ["a", "b", "a"]
    items = read(tmp_path, source("a.arrow", text="s.t"))
    assert texts_of(items) == ["x"] and bad(items) == [("record 2", "not_text"), ("record 3", "not_text")]


def test_bad_records_of_an_arrow_file_are_set_aside_one_by_one(tmp_path):
    values = pa.array([b"one", b"\xff", None, b"", b"a\0"], type=pa.binary()).view(pa.string())
    write_stream(tmp_path / "a.arrow", [pa.record_batch({"text": values})] * 2)

    items = read(tmp_path, source("a.arrow"))

    assert texts_of(items) == ["one", "one"]
    reasons = ["invalid_utf8", "not_text", "nul"]
    assert bad(items) == [(f"record {n}", r) for n, r in zip((2, 3, 5, 7, 8, 10), reasons * 2, strict=True)]
    assert [item.id for item in items if isinstance(item, Filtered)] == ["a.arrow:4", "a.arrow:9"]


def test_a_missing_or_wrong_column_is_one_bad_record(tmp_path):
    write_stream(tmp_path / "a.arrow", [pa.record_batch({"body": ["x"], "n": [1]})])
    assert bad(read(tmp_path, source("a.arrow"))) == [("whole file", "missing_field")]
    assert bad(read(tmp_path, source("a.arrow", text="n"))) == [("whole file", "not_text")]


def test_a_truncated_arrow_stream_is_distinguished_from_a_complete_one(tmp_path):
    path = tmp_path / "a.arrow"
    batch = pa.record_batch({"text": ["one", "two"]})
    write_stream(path, [batch, batch])
    whole = path.read_bytes()

    path.write_bytes(whole[:-8])  # between two batches: nothing is missing but the mark
    items = read(tmp_path, source("a.arrow"))
    assert texts_of(items) == ["one", "two"] * 2 and bad(items) == [("after record 4", "truncated")]

    path.write_bytes(whole[:-40])
    items = read(tmp_path, source("a.arrow"))
    assert texts_of(items) == ["one", "two"] and bad(items) == [("after record 2", "truncated")]

    for content in (b"", b"no Arrow", b"ARROW1 but nothing more"):
        path.write_bytes(content)
        assert [record for record, _ in bad(read(tmp_path, source("a.arrow")))] == ["whole file"]
    with pytest.raises(FileNotFoundError):
        list(source().read_units([tmp_path / "gone.arrow"], 0))


def test_records_after_an_early_end_of_an_arrow_stream_are_reported(tmp_path):
    path = tmp_path / "a.arrow"
    write(path, "one", "two")
    path.write_bytes(path.read_bytes() * 2)

    items = read(tmp_path, source("a.arrow"))

    assert texts_of(items) == ["one", "two"] and bad(items) == [("after record 2", "corrupt_page")]


def test_offsets_that_leave_an_arrow_file_cost_only_their_batch(tmp_path):
    path = tmp_path / "a.arrow"
    write_stream(path, [pa.record_batch({"text": ["one", "two", "three" * 5]}), pa.record_batch({"text": ["four"]})])
    data = path.read_bytes()
    offsets = np.array([0, 3, 6, 31], dtype="<i4").tobytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, np.array([0, 1 << 30, 6, 31], dtype="<i4").tobytes()))

    items = read(tmp_path, source("a.arrow"))

    assert bad(items) == [("after record 0", "corrupt_page")] and texts_of(items) == ["four"]
    assert isinstance(items[1], Document) and items[1].id == "a.arrow:4"


def test_mutated_arrow_streams_give_items_and_never_an_error(tmp_path):
    path = tmp_path / "a.arrow"
    rng = np.random.default_rng(0)
    batches = [pa.record_batch({"text": [f"{number} " + "word " * 5 for number in range(9)]})] * 3
    write_stream(path, batches)
    whole = path.read_bytes()
    reasons: Counter[str] = Counter()
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, len(data), size=int(rng.integers(1, 4))):
            data[position] = int(rng.integers(256))
        path.write_bytes(data[: int(rng.integers(1, len(data)))] if rng.random() < 0.2 else data)
        items = read(tmp_path, source("a.arrow"))
        assert 1 <= len(items) <= 28
        reasons.update(reason for _, reason in bad(items))
    assert len(reasons) > 2, "the mutations hardly broke anything"


# The Hub's layout


@pytest.mark.parametrize(
    ("files", "train", "test"),
    [
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "x.parquet"], 1, 1),
        (["data/train-00000-of-00002-ab12.parquet", "data/train-00001-of-00002-cd34.parquet"], 2, 0),
        (["train.jsonl", "test.jsonl"], 1, 1),
        (["sub/my_train_0.jsonl", "sub/my-training.jsonl", "sub/evaluation.1.jsonl"], 2, 1),
        (["train/a.jsonl.gz", "train/deep/b.jsonl.gz", "test/c.jsonl.gz"], 2, 1),
        (["en-train/a.jsonl.zst", "en.test/train.jsonl.zst"], 1, 1),
        (["books/a.parquet", "books/trainer.parquet", "b.parquet"], 3, 0),
        ([".cache/x.parquet", "__old/y.parquet", "a.parquet", "notes.csv"], 1, 0),
        (
            [
                "c4-train.00000-of-00002.json.gz",
                "c4-train.00001-of-00002.json.gz",
                "c4-validation.00000-of-00001.json.gz",
            ],
            2,
            0,
        ),
        (["train/dataset_info.json", "config.json", "test.jsonl"], 0, 1),
        (["cache-train.arrow", "cache-test.arrow"], 1, 1),
    ],
)
def test_splits_are_recognised_by_name_as_the_hub_does(tmp_path, files, train, test):
    for file in files:
        write(tmp_path / file, file)

    for split, count in (("train", train), ("test", test)):
        if count:
            items = read(tmp_path, source(split=split))
            assert len(items) == len(texts_of(items)) == count
        else:
            with pytest.raises(ConfigError, match="no split"):
                source(split=split).units(tmp_path)


def test_a_split_with_a_name_of_its_own_is_found_in_numbered_files(tmp_path):
    write(tmp_path / "data/long_books-00000-of-00001.parquet", "one")
    assert texts_of(read(tmp_path, source(split="long_books"))) == ["one"]
    with pytest.raises(ConfigError, match="set split to one of: 'long_books'"):
        source().units(tmp_path)


def test_of_several_formats_the_most_frequent_is_read(tmp_path):
    for file in ("a.parquet", "b.parquet", "copy.jsonl"):
        write(tmp_path / file, file)
    assert names(tmp_path, source()) == ["a.parquet", "b.parquet"]


FORMS = {
    "data_files: en/*.jsonl": ["en/a.jsonl", "en/b.jsonl"],
    "data_files: ['en/a*', 'de/*']": ["de/a.jsonl", "de/deep/a.jsonl", "en/a.jsonl"][::2],
    "data_files: [{split: train, path: 'en/[!b]*'}, {split: test, path: de/a.jsonl}]": ["en/a.jsonl"],
    "data_files: [{split: train, path: [./en/b.jsonl, 'de/**']}]": ["de/a.jsonl", "de/deep/a.jsonl", "en/b.jsonl"],
    "data_files: '**/a.jsonl'": ["a.jsonl", "de/a.jsonl", "de/deep/a.jsonl", "en/a.jsonl"],
    "data_files: '**/d??p/*'": ["de/deep/a.jsonl"],
    "data_dir: en": ["en/a.jsonl", "en/b.jsonl"],
    "data_dir: de\n  data_files: deep/*": ["de/deep/a.jsonl"],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_card_says_which_files_belong_to_a_split(tmp_path, form):
    for file in ("a.jsonl", "en/a.jsonl", "en/b.jsonl", "de/a.jsonl", "de/deep/a.jsonl"):
        write(tmp_path / file, file)
    card(tmp_path, f"configs:\n- config_name: default\n  {form}")

    assert names(tmp_path, source()) == FORMS[form]


def test_a_configuration_is_chosen_by_name_or_is_the_default_one(tmp_path):
    for file in ("en/a.jsonl", "de/a.jsonl"):
        write(tmp_path / file, file)
    both = "configs:\n- {config_name: en, data_files: en/*}\n- {config_name: de, data_files: de/*"
    card(tmp_path, both + "}")
    assert names(tmp_path, source(config="de")) == ["de/a.jsonl"]
    with pytest.raises(ConfigError, match="several configurations; set config to one of: 'en', 'de'"):
        source().units(tmp_path)
    with pytest.raises(ConfigError, match="no configuration 'fr'; set config to one of: 'en', 'de'"):
        source(config="fr").units(tmp_path)
    card(tmp_path, both + ", default: true}")
    assert names(tmp_path, source()) == ["de/a.jsonl"]


def test_without_a_card_a_configuration_is_a_folder(tmp_path):
    for file in ("en/train.jsonl", "de/train.jsonl"):
        write(tmp_path / file, file)
    assert names(tmp_path, source(config="de")) == ["de/train.jsonl"]
    with pytest.raises(ConfigError, match="configuration 'fr' does not exist"):
        source(config="fr").units(tmp_path)


@pytest.mark.parametrize("configs", ["configs: [", "configs:\n- {config_name: a, data_files: [{split: train}]}"])
def test_a_card_that_makes_no_sense_is_refused(tmp_path, configs):
    write(tmp_path / "a.jsonl", "one")
    card(tmp_path, configs)
    with pytest.raises(DataError, match=r"README\.md"):
        source().units(tmp_path)


@pytest.mark.parametrize("configs", ["configs: 7", "configs: []", "tags: [a]", "configs: [1, {a: 2}]"])
def test_a_card_without_configurations_changes_nothing(tmp_path, configs):
    write(tmp_path / "a.jsonl", "one")
    card(tmp_path, configs)
    assert names(tmp_path, source()) == ["a.jsonl"]


def test_a_folder_without_data_and_a_path_that_is_neither_are_refused(tmp_path):
    (tmp_path / "table.csv").touch()
    with pytest.raises(ConfigError, match="holds no Parquet, JSONL or Arrow files"):
        source().units(tmp_path)
    with pytest.raises(ConfigError, match="nor a Hub id; give one such as org/name"):
        source("a/b/c").units(tmp_path)


@pytest.mark.parametrize("listed", [3, "data", [{"filename": "x" * 5000}], [{"filename": "\0"}], [{"filename": ["a"]}]])
def test_a_state_file_with_an_impossible_file_name_is_refused(tmp_path, listed):
    save_to_disk(tmp_path, ["one"])
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": listed}))
    with pytest.raises(DataError, match=r"state\.json: lists") as caught:
        source().units(tmp_path)
    assert len(str(caught.value)) < 400
