"""MDS folders read back exactly, however they are laid out."""

import json
import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from unspool.core.errors import ConfigError
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.packing.build import build_rows
from unspool.data.packing.config import DatasetConfig
from unspool.data.packing.row import IGNORE, labels
from unspool.data.packing.store import open_rows
from unspool.data.sources.base import Bad, Document

from .mds_folders import PACKED, UNPACKED, bad, read, save_index, source, tokens_of, unpacked, write


@pytest.mark.parametrize("compression", [None, "zstd:7", "zstd", "gz", "bz2:9"])
@pytest.mark.parametrize("seed", range(3))
def test_unpacked_documents_read_back_exactly(tmp_path, compression, seed):
    samples = unpacked(np.random.default_rng(seed), 50)
    write(tmp_path / "books", UNPACKED, samples, per_shard=17, compression=compression, hashes=("sha1",))

    items = read(tmp_path)

    assert tokens_of(items) == [sample["input_ids"].tolist() for sample in samples]
    assert all(isinstance(item, Document) and item.tokens.dtype == np.uint32 and item.text == "" for item in items)
    names = [item.id.rsplit("/", 1)[1].partition(".mds")[0] for item in items if isinstance(item, Document)]
    assert Counter(names) == {"shard.00000": 17, "shard.00001": 17, "shard.00002": 16}
    assert isinstance(items[17], Document) and items[17].id.startswith("books/shard.00001.mds")
    assert items[17].id.endswith(":1")


@pytest.mark.parametrize("compression", [None, "zstd:7"])
def test_packed_rows_yield_their_documents_apart(tmp_path, compression):
    rng = np.random.default_rng(0)
    samples, expected = [], []
    for _ in range(30):
        row = rng.integers(0, 128_256, size=4096).astype(np.uint32)
        cuts = [0, *sorted(rng.choice(np.arange(1, 4096), size=int(rng.integers(6)), replace=False).tolist()), 4096]
        borders = np.array(list(pairwise(cuts)), dtype=np.uint32)
        samples.append({"domain": "x", "indices": borders, "input_ids": row, "length": 4096})
        expected += [row[begin:end].tolist() for begin, end in borders]
    write(tmp_path, PACKED, samples, per_shard=11, compression=compression)

    items = read(tmp_path)

    assert tokens_of(items) == expected
    ids = [item.id for item in items if isinstance(item, Document)]
    assert len(set(ids)) == len(ids) and ids[0].endswith(":1.1")


@pytest.mark.parametrize(
    ("encoding", "dtype"),
    [(f"ndarray:{dtype}", dtype) for dtype in ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")]
    + [("ndarray", "uint16"), ("ndarray", "int64"), ("ndarray:uint32:64", "uint32"), ("json", "int64")],
)
def test_tokens_of_every_whole_number_type_become_uint32(tmp_path, encoding, dtype):
    values = np.random.default_rng(0).integers(0, 100, size=64).astype(dtype)
    write(tmp_path, {"input_ids": encoding}, [{"input_ids": values.tolist() if encoding == "json" else values}])

    (document,) = read(tmp_path)

    assert isinstance(document, Document) and document.tokens is not None
    assert document.tokens.dtype == np.uint32 and document.tokens.tolist() == values.tolist()


@pytest.mark.parametrize("length", [1, 255, 256, 65_535, 65_536])
def test_the_width_of_a_length_follows_its_size(tmp_path, length):
    write(tmp_path, {"input_ids": "ndarray:uint32"}, [{"input_ids": np.arange(length, dtype=np.uint32)}])
    assert tokens_of(read(tmp_path)) == [list(range(length))]


def test_columns_that_are_not_needed_are_stepped_over_unread(tmp_path):
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    columns = {"a": "pkl", "b": "bytes", "c": "float32", "d": "str", "input_ids": "ndarray:uint32", "z": "uint8"}
    columns |= {"j": "jpeg", "f": "float64"}
    values = {"a": Trap(), "b": b"\xff" * 7, "c": 1.5, "d": "ä", "z": 3, "f": 2.5}
    row = np.array([5, 6, 7], dtype=np.uint32)
    shards = write(tmp_path, columns | {"j": "bytes"}, [values | {"j": b"no image", "input_ids": row}])
    save_index(tmp_path, [shards[0] | {"column_encodings": [columns[name] for name in sorted(columns)]}])

    assert tokens_of(read(tmp_path)) == [[5, 6, 7]]
    assert not (tmp_path / "sprung").exists()


def test_a_pickled_column_of_tokens_or_borders_is_refused(tmp_path):
    row = np.array([1, 2], dtype=np.uint32)
    write(tmp_path / "tokens", {"input_ids": "pkl"}, [{"input_ids": row}])
    write(
        tmp_path / "borders", PACKED | {"indices": "pkl"}, [{"domain": "", "indices": 1, "input_ids": row, "length": 2}]
    )

    for folder in ("tokens", "borders"):
        (item,) = read(tmp_path, folder)
        assert isinstance(item, Bad) and item.reason == "not_tokens" and "pickled" in item.detail


def test_the_tokens_may_lie_in_another_column(tmp_path):
    write(tmp_path, {"ids": "ndarray:int32"}, [{"ids": np.array([3, 4], dtype=np.int32)}])
    assert tokens_of(read(tmp_path, tokens="ids")) == [[3, 4]]
    (item,) = read(tmp_path)
    assert isinstance(item, Bad) and item.reason == "missing_field" and "'ids'" in item.detail


# Loss masks

MASKED = {"input_ids": "ndarray:uint32", "mask": "ndarray:uint8"}


def masked_sample(rng: np.random.Generator, length: int, dtype: str = "uint8") -> dict[str, Any]:
    """A conversation as instruction data stores it: runs of 0 and 1, never a trained first token."""
    mask = np.repeat(np.arange(length) % 2, rng.integers(1, 9, size=length))[:length].astype(dtype)
    return {"input_ids": rng.integers(0, 300, size=length).astype(np.uint32), "mask": mask}


@pytest.mark.parametrize(("encoding", "dtype"), [("ndarray:uint8", "uint8"), ("ndarray", "int64"), ("json", "list")])
def test_the_mask_column_is_the_loss_mask(tmp_path, encoding, dtype):
    sample = masked_sample(np.random.default_rng(0), 40)
    mask = sample["mask"].tolist()
    stored = mask if dtype == "list" else sample["mask"].astype(dtype)
    write(tmp_path, MASKED | {"mask": encoding}, [sample | {"mask": stored}])

    (item,) = read(tmp_path)
    (other,) = read(tmp_path, mask=None)

    assert isinstance(item, Document) and item.loss_mask is not None
    assert item.loss_mask.tolist() == [bool(value) for value in mask]
    assert isinstance(other, Document) and other.loss_mask is None


@pytest.mark.parametrize(
    ("encoding", "mask", "detail"),
    [
        ("ndarray:uint8", np.ones(39, dtype=np.uint8), r"'mask' has the shape \(39,\) for 40 tokens"),
        ("ndarray:uint8", np.ones((40, 1), dtype=np.uint8), "has the shape"),
        (
            "ndarray:float32",
            np.ones(40, dtype=np.float32),
            "0 and 1, not 1.0 to 1.0 of float32",
        ),
        ("ndarray:int8", np.full(40, -100, dtype=np.int8), "0 and 1, not -100 to -100 of int8"),
        ("pkl", [1] * 40, "pickled"),
    ],
)
def test_a_mask_that_does_not_fit_its_tokens_sets_the_sample_aside(tmp_path, encoding, mask, detail):
    sample = masked_sample(np.random.default_rng(0), 40)
    write(tmp_path, MASKED | {"mask": encoding}, [sample | {"mask": mask}])
    (item,) = read(tmp_path)
    assert isinstance(item, Bad) and re.search(detail, item.detail), item


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_masks_travel_into_the_labels_of_packed_rows(tmp_path, tokenizer, packing):
    """Also masks of documents in packed samples, next to a shard without masks, which is fully trained on."""
    rng = np.random.default_rng(1)
    samples = [masked_sample(rng, 400) | {"indices": np.array([[0, 150], [150, 400]], np.uint32)} for _ in range(20)]
    plain = [sample | {"input_ids": sample["input_ids"] % 300} for sample in unpacked(rng, 3)]
    write(tmp_path / "mds/talks", MASKED | {"indices": "ndarray:uint32"}, samples, per_shard=7)
    write(tmp_path / "mds/books", UNPACKED, plain)
    engine = EngineConfig(workers=1)
    counts = build_corpus(source("mds"), tmp_path / "talks", tokenizer=tokenizer, root=tmp_path, engine=engine, seed=0)
    config = DatasetConfig.model_validate({"from": "talks", "seq_len": 512, "packing": packing})
    build_rows(config, {"talks": tmp_path / "talks"}, tmp_path / "rows", tokenizer=tokenizer, seed=0)

    # The token after each pair of tokens, if it is trained on. Pairs are rarely repeated, and then all of them count.
    docs = [(sample["input_ids"], sample["mask"].astype(bool)) for sample in samples]
    docs = [(tokens[cut], mask[cut]) for tokens, mask in docs for cut in (slice(150), slice(150, 400))]
    docs += [(sample["input_ids"], np.ones(len(sample["input_ids"]), dtype=bool)) for sample in plain]
    expected: dict[tuple[int, ...], set[bool]] = {}
    for tokens, mask in docs:
        for at in range(2, len(tokens)):
            expected.setdefault(tuple(tokens[at - 2 : at + 1].tolist()), set()).add(bool(mask[at]))
    checked = 0
    rows = open_rows(tmp_path / "rows")
    for row in (rows[index] for index in range(len(rows))):
        found = labels(row.tokens, row.doc_lens, row.loss_mask)
        for stop, length in zip(np.cumsum(row.doc_lens).tolist(), row.doc_lens.tolist(), strict=True):
            for at in range(stop - length + 2, stop):
                trained = expected.get(tuple(row.tokens[at - 2 : at + 1].tolist()))
                if trained is None:
                    assert packing == "best_fit" and not row.loss_mask[at], "only padding is in no document"
                    continue
                assert (found[at - 1] != IGNORE) in trained
                checked += len(trained) == 1
    assert checked > 4000
    assert counts["trained_tokens"] == sum(int(mask[1:].sum()) for _, mask in docs)


# Folders


def merged(folder: Path, shards: dict[str, list[dict[str, Any]]]) -> None:
    """Write an index over all parts of a folder, as ProLong's tools do next to the index of each part."""
    together = []
    for part, listed in shards.items():
        for shard in json.loads(json.dumps(listed)):
            for key in ("raw_data", "zip_data"):
                if shard[key]:
                    shard[key]["basename"] = f"{part}/{shard[key]['basename']}"
            together.append(shard)
    save_index(folder, together)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("keep", ["both", "merged", "parts"])
def test_a_shard_that_several_indexes_name_is_read_once(tmp_path, compression, keep):
    rng = np.random.default_rng(0)
    expected, shards = [], {}
    for part in ("proc00-64", "proc01-64"):
        samples = unpacked(rng, 6)
        shards[part] = write(tmp_path / "book" / part, UNPACKED, samples, per_shard=3, compression=compression)
        expected += [sample["input_ids"].tolist() for sample in samples]
        if keep == "merged":
            (tmp_path / "book" / part / "index.json").unlink()
    if keep != "parts":
        merged(tmp_path / "book", shards)

    assert len(source().units(tmp_path)) == 4
    assert tokens_of(read(tmp_path)) == expected


def test_a_shard_that_is_not_there_is_one_bad_record_and_no_unit(tmp_path):
    rng = np.random.default_rng(0)
    shards = {"part": write(tmp_path / "book/part", UNPACKED, unpacked(rng, 6), per_shard=3)}
    merged(tmp_path / "book", shards)
    (tmp_path / "book/part/shard.00000.mds").unlink()

    units = source().units(tmp_path)
    items = read(tmp_path)

    assert all(unit.is_file() for unit in units)
    assert len(tokens_of(items)) == 3
    assert [(Path(item.file).name, item.reason) for item in items if isinstance(item, Bad)] == [
        ("shard.00000.mds", "unreadable")
    ]


def test_a_shard_that_is_a_pipe_is_not_waited_for(tmp_path):
    write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 2))
    (tmp_path / "shard.00000.mds").unlink()
    os.mkfifo(tmp_path / "shard.00000.mds")
    assert bad(read(tmp_path)) == [("whole file", "unreadable")]


def test_units_are_sorted_shards_that_can_be_read_apart(tmp_path):
    samples = unpacked(np.random.default_rng(0), 9)
    write(tmp_path / "b", UNPACKED, samples, per_shard=3)
    write(tmp_path / "a", UNPACKED, samples, per_shard=5)

    units = source().units(tmp_path)

    assert [str(unit.relative_to(tmp_path)) for unit in units] == [
        f"{folder}/shard.{number:05}.mds" for folder, count in (("a", 2), ("b", 3)) for number in range(count)
    ]
    apart = [tokens for unit in units for tokens in tokens_of(list(source().read_units([unit], 0)))]
    assert apart == tokens_of(read(tmp_path)) and len(apart) == 18
    assert source("a/shard.00001.mds").units(tmp_path) == [units[1]]
    assert source("*/index.json").units(tmp_path) == units


def test_a_decompressed_shard_is_preferred_to_its_compressed_form(tmp_path):
    samples = unpacked(np.random.default_rng(0), 3)
    write(tmp_path, UNPACKED, samples, compression="zstd")
    packed = tmp_path / "shard.00000.mds.zstd"
    (tmp_path / "shard.00000.mds").write_bytes(zstandard.decompress(packed.read_bytes()))
    packed.write_bytes(b"not needed")

    assert tokens_of(read(tmp_path)) == [sample["input_ids"].tolist() for sample in samples]


def test_no_index_or_no_shard_is_refused_before_any_work(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no index\.json"):
        source().units(tmp_path)
    save_index(tmp_path, [])
    with pytest.raises(ConfigError, match="list no shard"):
        source().units(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "broken_json"),
        (b"\xff\xfe", "broken_json"),
        (b"[" * 100_000, "broken_json"),
        (b"[]", "unreadable"),
        (b'{"version": 2}', "unreadable"),
        (b'{"shards": {}}', "unreadable"),
    ],
)
def test_a_broken_index_is_set_aside_and_its_neighbours_read(tmp_path, content, reason):
    write(tmp_path / "good", UNPACKED, unpacked(np.random.default_rng(0), 2))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "index.json").write_bytes(content)

    items = read(tmp_path)

    assert bad(items) == [("whole file", reason)] and len(tokens_of(items)) == 2


@pytest.mark.parametrize(
    "name",
    ["../outside.mds", "/etc/passwd", "a/../../outside.mds", "index.json", "..", "a\0b", "", 7, "x" * 300, "\ud800"],
)
def test_an_index_that_names_a_file_outside_its_folder_is_set_aside(tmp_path, name):
    folder = tmp_path / "in"
    (shard,) = write(folder, UNPACKED, unpacked(np.random.default_rng(0), 2))
    (tmp_path / "outside.mds").write_bytes((folder / "shard.00000.mds").read_bytes())
    save_index(folder, [shard, shard | {"raw_data": shard["raw_data"] | {"basename": name}}, "no shard"])

    items = read(folder)

    assert len(tokens_of(items)) == 2
    assert [record for record, _ in bad(items)] == ["shard 2", "shard 3"]
    assert all(reason in ("unsafe_path", "unreadable") for _, reason in bad(items))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"format": "jsonl"},
        {"column_names": None},
        {"column_names": ["input_ids"]},
        {"column_names": [1, 2, 3]},
        {"column_encodings": "str"},
        {"column_sizes": [None, None]},
        {"column_sizes": [None, -1, None]},
        {"samples": "2"},
        {"samples": 3},
        {"zip_data": [1], "raw_data": {"basename": "shard.00000.mds", "hashes": {"sha1": 5}}},
    ],
)
def test_an_index_entry_that_makes_no_sense_sets_the_shard_aside(tmp_path, change):
    (shard,) = write(tmp_path, UNPACKED, unpacked(np.random.default_rng(0), 2))
    save_index(tmp_path, [shard | change])

    items = read(tmp_path)

    assert [record for record, _ in bad(items)] == ["whole file"] and len(items) == 1
