"""Kind `stack`: Parquet with one code file per record, grouped into repositories through sorted runs on disk."""

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unspool.core.errors import DataError
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import spill, stack
from unspool.data.sources.base import Bad, Document, Filtered
from unspool.data.sources.stack import StackSource

from ..conftest import build_tokenizer, prose

File = tuple[str, str, str]  # repository, path, text


def files_of(sizes: dict[str, int], words: int = 12) -> list[File]:
    return [
        (repo, f"src/f{number}.py", f"{repo} {number}\n{prose(words, seed=number)}\n")
        for repo, size in sizes.items()
        for number in range(size)
    ]


def write(folder: Path, files: list[File], *, per_file: int = 10, seed: int | None = 0) -> None:
    """In an order that scatters every repository over all Parquet files."""
    if seed is not None:
        files = [files[index] for index in np.random.default_rng(seed).permutation(len(files))]
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(files), per_file):
        repos, paths, texts = zip(*files[start : start + per_file], strict=True)
        table = pa.table({"max_stars_repo_name": repos, "max_stars_repo_path": paths, "content": texts})
        pq.write_table(table, folder / f"train-{start:05d}.parquet")


def source(folder: Path, **settings) -> StackSource:
    return StackSource(kind="stack", path=str(folder), **settings)


def read(folder: Path, seed: int = 0, **settings) -> list:
    made = source(folder, **settings)
    return list(made.read(made.units(Path()), seed))


def documents(items: list) -> dict[str, str]:
    return {item.id: item.text for item in items if isinstance(item, Document)}


def build(root: Path, out: str, *, workers: int = 1, **settings) -> dict:
    return build_corpus(
        source(root / "in", **settings),
        root / out,
        tokenizer=build_tokenizer(),
        root=root,
        engine=EngineConfig(workers=workers),
        seed=0,
    )


@pytest.fixture
def small_runs(monkeypatch):
    """Many runs of a few records each, many parts, and one task per Parquet file."""
    monkeypatch.setattr(spill, "SORT_BYTES", 600)
    monkeypatch.setattr(stack, "INPUT_BYTES", 1)
    monkeypatch.setattr(stack, "PART_BYTES", 4000)


def test_all_files_of_a_repository_are_one_document_and_every_record_is_counted(tmp_path):
    files = files_of({"a/one": 1, "b/many": 37, "c/some": 5})
    write(tmp_path / "in", files)

    items = read(tmp_path / "in")
    found = documents(items)

    assert sorted(found) == ["a/one:1", "b/many:1", "c/some:1"]
    for repo, path, text in files:
        assert found[f"{repo}:1"].count(f"# file: {path}\n{text}") == 1
    assert len(items) == len(files)
    assert sum(isinstance(item, Filtered) and item.reason == "joined" for item in items) == len(files) - 3


def test_documents_do_not_depend_on_the_order_of_the_input_nor_on_how_it_is_sorted(tmp_path, small_runs, monkeypatch):
    files = files_of({f"o/r{number}": 1 + number * 3 for number in range(9)})
    write(tmp_path / "in", files, seed=1)
    build(tmp_path, "runs")
    write(tmp_path / "again/in", files, per_file=50, seed=2)
    monkeypatch.setattr(spill, "SORT_BYTES", 1 << 20)
    build(tmp_path / "again", "whole")

    runs, whole = open_corpus(tmp_path / "runs"), open_corpus(tmp_path / "again/whole")
    assert len(runs) == 9
    assert {runs.id(at): runs[at].tolist() for at in range(9)} == {whole.id(at): whole[at].tolist() for at in range(9)}


def test_another_seed_orders_repositories_and_files_differently(tmp_path):
    write(tmp_path / "in", files_of({f"o/r{number}": 6 for number in range(8)}))
    first, second = documents(read(tmp_path / "in")), documents(read(tmp_path / "in", seed=1))
    assert list(first) != list(second) and sorted(first) == sorted(second)
    assert first != second


def test_a_repository_longer_than_a_document_may_be_continues_in_the_next(tmp_path, monkeypatch):
    files = files_of({"o/large": 30, "o/small": 2})
    write(tmp_path / "in", files)
    monkeypatch.setattr(stack, "MAX_TEXT_BYTES", 1000)

    items = read(tmp_path / "in")
    found = documents(items)

    large = [text for name, text in found.items() if name.startswith("o/large")]
    assert len(large) >= 3 and all(len(text.encode()) <= 1000 for text in large)
    assert sum("".join(large).count(text) for repo, _, text in files if repo == "o/large") == 30
    assert len(items) == len(files)


def test_files_that_kind_repos_leaves_out_are_listed_and_filter_false_keeps_all_text(tmp_path):
    files = [
        ("o/r", "a.py", "print(1)\n"),
        ("o/r", "vendor/lib.py", "vendored = 1\n"),
        ("o/r", "a.py", "print(2)\n"),
        ("o/r", "b.py", "a\0b"),
        ("o/none", "yarn.lock", "x"),
    ]
    write(tmp_path / "in", files, seed=None)

    items = read(tmp_path / "in")
    (document,) = (item for item in items if isinstance(item, Document))
    assert document.text == "# file: a.py\nprint(1)\n"
    assert dict(document.left_out) == {"vendor/lib.py": "vendored", "a.py": "duplicate", "b.py": "binary"}
    assert len(items) == len(files)

    kept = documents(read(tmp_path / "in", filter=False))
    assert "vendored = 1" in kept["o/r:1"] and kept["o/none:1"] == "# file: yarn.lock\nx\n"


def test_missing_columns_and_values_are_quarantined(tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"repo": ["a"], "text": ["b"]}), tmp_path / "in/other.parquet")
    table = {"max_stars_repo_name": ["a", None], "max_stars_repo_path": ["p", "q"], "content": ["text", "text"]}
    pq.write_table(pa.table(table), tmp_path / "in/some.parquet")

    bad = [item for item in read(tmp_path / "in") if isinstance(item, Bad)]
    assert [item.reason for item in bad] == ["missing_field", "not_text"]
    assert "no column 'max_stars_repo_name'; it has 'repo', 'text'" in bad[0].detail
    assert bad[1].record == "record 2"


def test_a_build_that_dies_between_the_passes_does_not_sort_again(tmp_path, small_runs, monkeypatch):
    write(tmp_path / "in", files_of({f"o/r{number}": 1 + number * 3 for number in range(9)}))
    build(tmp_path, "straight")

    sorted_tasks: list[int] = []
    real = StackSource.spill

    def spill_noted(self, task, number, *rest):
        sorted_tasks.append(number)
        real(self, task, number, *rest)

    monkeypatch.setattr(StackSource, "spill", spill_noted)
    monkeypatch.setattr(StackSource, "read", lambda *_: (_ for _ in ()).throw(DataError("died")))
    with pytest.raises(DataError, match="died"):
        build(tmp_path, "killed")
    assert len(sorted_tasks) == len(set(sorted_tasks)) > 5
    monkeypatch.undo()
    monkeypatch.setattr(spill, "SORT_BYTES", 600)
    monkeypatch.setattr(stack, "INPUT_BYTES", 1)
    monkeypatch.setattr(stack, "PART_BYTES", 4000)

    # One run vanished and one has a flipped byte; only these two are sorted again.
    work = tmp_path / "killed.partial/tasks/spill"
    (work / "run-00001.zst").unlink()
    damaged = bytearray((work / "run-00002.zst").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (work / "run-00002.zst").write_bytes(damaged)
    sorted_tasks.clear()
    monkeypatch.setattr(StackSource, "spill", spill_noted)
    with pytest.raises(DataError, match=r"run-00002.zst is damaged; run the same command again"):
        build(tmp_path, "killed")
    build(tmp_path, "killed")

    assert sorted_tasks == [1, 2]
    straight, killed = open_corpus(tmp_path / "straight"), open_corpus(tmp_path / "killed")
    assert [killed[at].tolist() for at in range(len(killed))] == [straight[at].tolist() for at in range(len(straight))]
    assert not (tmp_path / "killed/tasks").exists()


def test_two_workers_write_the_same_as_one_and_the_limit_takes_whole_repositories(tmp_path, small_runs, caplog):
    caplog.set_level(logging.INFO)
    write(tmp_path / "in", files_of({f"o/r{number}": 4 for number in range(20)}))
    whole = build(tmp_path, "one")
    build(tmp_path, "limited", limit=whole["tokens"] // 3)
    assert "sorting 8 files on disk, in 8 tasks" in caplog.text

    one, limited = open_corpus(tmp_path / "one"), open_corpus(tmp_path / "limited")
    assert 0 < len(limited) < len(one) == 20
    assert [limited[at].tolist() for at in range(len(limited))] == [one[at].tolist() for at in range(len(limited))]
    assert whole["records"] == 80 and whole["filtered"] == {"joined": 60}
