import numpy as np
import pyarrow as pa
import pytest

from unspool.core.errors import DataError
from unspool.data.corpus.store import CorpusWriter, keep_first, open_corpus
from unspool.data.packing import store
from unspool.data.packing.row import Row
from unspool.data.packing.store import RowWriter, open_rows


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    # So that a few rows already span several batches and files.
    monkeypatch.setattr(store, "BATCH_TOKENS", 40)
    monkeypatch.setattr(store, "FILE_TOKENS", 100)


def documents(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(2**32, size=size, dtype=np.uint32) for size in rng.integers(1, 30, size=count)]


def write_corpus(folder, docs):
    half = len(docs) // 2
    for shard, part in enumerate((docs[:half], docs[half:])):
        with CorpusWriter(folder / f"docs-{shard:05d}.arrow") as writer:
            for number, tokens in enumerate(part):
                writer.append(f"{shard}:{number}", tokens)


def rows(count: int, *, masked: bool) -> list[Row]:
    rng = np.random.default_rng(1)
    made = []
    for number in range(count):
        mask = rng.random(16) < 0.5 if masked else None
        lens = np.array([5, 11] if number % 2 else [16], dtype=np.int32)
        made.append(Row(rng.integers(2**32, size=16, dtype=np.uint32), lens, mask, f"s{number}", "full"))
    return made


def test_a_corpus_reads_as_written_by_index_and_in_order(tmp_path):
    docs = documents(50)
    write_corpus(tmp_path, docs)

    reader = open_corpus(tmp_path)

    assert len(reader) == 50
    assert reader.num_tokens == sum(map(len, docs))
    for index in (49, 0, 25, 24, 17):
        assert np.array_equal(reader[index], docs[index])
        assert reader.id(index) == f"{index // 25}:{index % 25}"
    assert all(np.array_equal(got, doc) for got, doc in zip(reader, docs, strict=True))
    assert reader.lens.tolist() == [len(doc) for doc in docs]
    with pytest.raises(IndexError):
        reader[50]


def test_a_corpus_file_opens_in_plain_pyarrow(tmp_path):
    docs = documents(6)
    write_corpus(tmp_path, docs)
    table = pa.ipc.open_file(tmp_path / "docs-00000.arrow").read_all()
    assert table.schema.types == [pa.string(), pa.large_list(pa.uint32())]
    assert table["tokens"].to_pylist() == [doc.tolist() for doc in docs[:3]]


def test_a_shard_without_documents_is_an_empty_file(tmp_path):
    write_corpus(tmp_path, [])
    assert len(open_corpus(tmp_path)) == 0


def test_keep_first_shortens_and_never_lengthens(tmp_path):
    docs = documents(20)
    write_corpus(tmp_path, docs)
    for count in (4, 8):
        keep_first(tmp_path / "docs-00000.arrow", count)
    reader = open_corpus(tmp_path)
    assert len(reader) == 4 + 10
    assert np.array_equal(reader[3], docs[3])
    assert np.array_equal(reader[4], docs[10])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [1, 2, 13])
def test_rows_read_as_written_across_batches_and_files(tmp_path, masked, count):
    made = rows(count, masked=masked)
    with RowWriter(tmp_path, row_len=16, masked=masked) as writer:
        for row in made:
            writer.append(row)

    stored = open_rows(tmp_path)

    assert len(list(tmp_path.iterdir())) == -(-count // 6), "files were expected to hold six rows"
    assert (len(stored), stored.row_len) == (count, 16)
    for index in reversed(range(count)):
        row = stored[index]
        assert np.array_equal(row.tokens, made[index].tokens)
        assert np.array_equal(row.doc_lens, made[index].doc_lens)
        assert row.tokens.dtype == np.uint32
        assert row.doc_lens.dtype == np.int32
        assert (row.source, row.attention) == (f"s{index}", "full")
        if masked:
            assert row.loss_mask.dtype == np.bool_
            assert np.array_equal(row.loss_mask, made[index].loss_mask)
        else:
            assert row.loss_mask is None
    for index in (-1, count):
        with pytest.raises(IndexError):
            stored[index]


def test_rows_are_views_of_the_file_not_copies(tmp_path):
    with RowWriter(tmp_path, row_len=16, masked=True) as writer:
        for row in rows(4, masked=True):
            writer.append(row)
    stored = open_rows(tmp_path)
    for view in (stored[1].tokens, stored[1].loss_mask, stored[1].doc_lens):
        assert not view.flags.owndata
        assert not view.flags.writeable
    assert np.shares_memory(stored[1].tokens, stored[1].tokens)


def test_an_error_while_writing_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), CorpusWriter(tmp_path / "docs-00000.arrow") as writer:
        writer.append("a", np.ones(100, dtype=np.uint32))
        raise RuntimeError
    with pytest.raises(RuntimeError), RowWriter(tmp_path, row_len=16, masked=False) as rows_writer:
        for row in rows(3, masked=False):
            rows_writer.append(row)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_cut_off_file_and_an_empty_folder_are_named(tmp_path):
    with RowWriter(tmp_path, row_len=16, masked=False) as writer:
        writer.append(rows(1, masked=False)[0])
    file = tmp_path / "rows-00000.arrow"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"rows-00000.arrow: not a complete Arrow file"):
        open_rows(tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"no rows-\*.arrow files"):
        open_rows(tmp_path)


def test_stored_documents_are_the_mapped_ones_in_any_slice(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BATCH_TOKENS", 40)  # several batches in a file
    rng = np.random.default_rng(0)
    docs = [rng.integers(0, 1 << 32, size=size, dtype=np.uint32) for size in (1, 39, 3, 100, 2, 0, 7, 41)]
    for number, part in enumerate((docs[:5], docs[5:])):
        with CorpusWriter(tmp_path / f"docs-0000{number}.arrow") as writer:
            for index, tokens in enumerate(part):
                writer.append(f"{number}:{index}", tokens)
    reader = open_corpus(tmp_path)
    for index, tokens in enumerate(docs):
        stored = reader.stored(index)
        assert len(stored) == len(tokens)
        for span in (slice(None), slice(0, 1), slice(1, 3), slice(5, 1000)):
            assert stored[span].tolist() == tokens[span].tolist() == reader[index][span].tolist()
