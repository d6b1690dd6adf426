"""Datasets from a fake Hub (a folder), compared with the library itself."""

import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from unspool.core.artifacts import file_digest
from unspool.core.errors import ConfigError, DataError
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.sources import hub_stream
from unspool.data.sources.base import SAMPLE_CHARS

from ..conftest import build_tokenizer, prose
from .hf_folders import card, read, source, texts_of, write


class FakeHub:
    """The calls of huggingface_hub that are used, answered from folders: one per revision."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.fetched: list[tuple[str, str]] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
        monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: self)
        hub_stream._footers.clear()
        hub_stream._file_system.cache_clear()
        self.num_bytes = 0
        self.broken_after: int | None = None

    def revision(self, revision: str | None) -> Path:
        folder = self.folder / (revision or "main").replace("/", "-").removesuffix("-commit")
        if not folder.is_dir():
            raise OSError(f"404: no revision {revision}")
        return folder

    def dataset_info(self, name: str, *, revision: str | None) -> SimpleNamespace:
        return SimpleNamespace(sha=f"{self.revision(revision).name}-commit")

    def list_repo_files(self, name: str, *, repo_type: str, revision: str) -> list[str]:
        assert (name, repo_type) == ("org/name", "dataset")
        folder = self.revision(revision)
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]

    def get_paths_info(self, name: str, paths: list[str], *, repo_type: str, revision: str) -> list[SimpleNamespace]:
        hashes = {path: file_digest(self.revision(revision) / path) for path in paths}
        return [SimpleNamespace(path=path, blob_id=hashed) for path, hashed in hashes.items()]

    def open(self, path: str, mode: str, *, cache_type: str) -> "CountedFile":
        name, _, rest = path.removeprefix("datasets/").partition("@")
        assert (name, mode, cache_type) == ("org/name", "rb", "none")
        revision, _, file = rest.partition("/")
        return CountedFile(self, self.revision(revision) / file)

    def download(self, name: str, filename: str, *, repo_type: str, revision: str) -> str:
        assert (name, repo_type) == ("org/name", "dataset")
        self.fetched.append((revision, filename))
        return str(self.revision(revision) / filename)


class CountedFile(io.FileIO):
    def __init__(self, hub: FakeHub, path: Path) -> None:
        super().__init__(path)
        self.hub = hub

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self.hub.num_bytes += len(data)
        if self.hub.broken_after is not None and self.hub.num_bytes > self.hub.broken_after:
            raise OSError("connection reset")
        return data


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return FakeHub(tmp_path / "hub", monkeypatch)


def test_a_hub_dataset_is_fetched_split_by_split_at_one_commit(tmp_path, hub):
    main = hub.folder / "main"
    write(main / "data/train-00000-of-00002.parquet", "one")
    write(main / "data/train-00001-of-00002.parquet", "two")
    write(main / "data/test-00000-of-00001.parquet", "three")
    card(main, "tags: [a]")

    assert texts_of(read(tmp_path, source("org/name"))) == ["one", "two"]
    assert hub.fetched == [("main-commit", "README.md")]  # the others are streamed
    assert [path.name for path in source("org/name").local_files(tmp_path)] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert {revision for revision, _ in hub.fetched} == {"main-commit"}


def test_a_revision_is_honoured_and_so_is_the_card(tmp_path, hub):
    write(hub.folder / "main/en/a.jsonl", "new")
    write(hub.folder / "v1/en/a.jsonl", "old")
    card(hub.folder / "v1", "configs: [{config_name: en, data_files: en/*}]")
    assert texts_of(read(tmp_path, source("org/name", revision="v1", config="en"))) == ["old"]


def test_a_dataset_in_other_formats_is_read_from_the_parquet_copy(tmp_path, hub):
    (hub.folder / "main").mkdir(parents=True)
    (hub.folder / "main/train.csv").touch()
    copy = hub.folder / "refs-convert-parquet"
    for config in ("default", "other"):
        write(copy / config / "train/0000.parquet", f"{config} 0")
        write(copy / config / "train/0001.parquet", f"{config} 1")
        write(copy / config / "partial-test/0000.parquet", "part")

    assert texts_of(read(tmp_path, source("org/name"))) == ["default 0", "default 1"]
    assert texts_of(read(tmp_path, source("org/name", config="other"))) == ["other 0", "other 1"]
    assert texts_of(read(tmp_path, source("org/name", revision="refs/convert/parquet"))) == ["default 0", "default 1"]
    with pytest.raises(ConfigError, match=r"only the first part of 'test'.*split: partial-test"):
        source("org/name", split="test").units(tmp_path)
    assert texts_of(read(tmp_path, source("org/name", split="partial-test"))) == ["part"]
    with pytest.raises(ConfigError, match="no split 'dev'"):
        source("org/name", split="dev").units(tmp_path)


def test_the_parquet_copy_never_replaces_a_revision(tmp_path, hub):
    (hub.folder / "v1").mkdir(parents=True)
    (hub.folder / "v1/train.csv").touch()
    write(hub.folder / "refs-convert-parquet/default/train/0000.parquet", "newest")
    with pytest.raises(ConfigError, match="holds no Parquet, JSONL or Arrow files for split 'train'"):
        source("org/name", revision="v1").units(tmp_path)


def test_without_the_hub_one_sentence_says_what_to_do(tmp_path, hub):
    with pytest.raises(ConfigError, match="hf download --repo-type dataset org/name --local-dir") as caught:
        source("org/name").units(tmp_path)
    assert "404" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_hub_name_is_distinguished_from_a_missing_network(tmp_path, hub, monkeypatch):
    def unknown(*_: Any, **__: Any) -> None:
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(hub, "dataset_info", unknown)
    with pytest.raises(ConfigError, match="no such dataset 'org/name' on the Hub; check the name"):
        source("org/name").units(tmp_path)


def test_a_folder_has_priority_over_the_hub(tmp_path, hub):
    write(tmp_path / "org/name/a.jsonl", "local")
    assert texts_of(read(tmp_path, source("org/name"))) == ["local"]
    assert hub.fetched == []


# Streaming


def write_rows(path: Path, texts: list[str], rows: int = 15) -> None:
    """Parquet in small row groups, with a second column that nobody needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(texts))
    other = [rng.bytes(400) for _ in texts]
    pq.write_table(pa.table({"text": texts, "other": other}), path, row_group_size=rows, compression="none")


def build(root: Path, out: str, **settings: Any) -> dict[str, Any]:
    return build_corpus(
        source("org/name", **settings),
        root / out,
        tokenizer=build_tokenizer(),
        root=root,
        engine=EngineConfig(workers=1),
        seed=0,
    )


@pytest.fixture
def streamed(hub, monkeypatch):
    """Two files of 150 documents in row groups of 15, of about 20 KB of text each."""
    monkeypatch.setattr(hub_stream, "TASK_BYTES", 1)
    texts = [prose(300, seed=number) for number in range(300)]
    for number in range(2):
        write_rows(hub.folder / f"main/data/train-{number:05}-of-00002.parquet", texts[number * 150 :][:150])
    return hub


def test_a_limit_fetches_the_row_groups_and_the_column_that_it_needs(tmp_path, streamed):
    size = sum(file.stat().st_size for file in (streamed.folder / "main/data").iterdir())
    whole = build(tmp_path, "whole")
    fetched_whole, streamed.num_bytes = streamed.num_bytes, 0
    counts = build(tmp_path, "part", limit=whole["tokens"] // 10)

    needed = counts["characters"]
    fixed = SAMPLE_CHARS + 2 * (64 << 10)  # to choose the tokenizer, and the ends of files, which hold their metadata
    assert counts["tokens"] < 1.1 * whole["tokens"] / 10
    assert needed < streamed.num_bytes < 1.5 * needed + fixed < size / 2, (needed, streamed.num_bytes, size)
    assert fetched_whole < size - 300 * 400 + fixed  # never the other column
    assert streamed.fetched == []


def test_a_broken_connection_costs_the_row_groups_in_flight(tmp_path, streamed):
    whole = build(tmp_path, "whole")
    total, streamed.num_bytes = streamed.num_bytes, 0
    hub_stream._footers.clear()
    streamed.broken_after = total // 2
    with pytest.raises(
        DataError, match=r"train-0000. ?.*cannot be downloaded \(connection reset\); run the same command"
    ):
        build(tmp_path, "again")
    before = streamed.num_bytes
    streamed.broken_after, streamed.num_bytes = None, 0
    # A commit that changes no data file does not restart the build.
    card(streamed.folder / "main", "tags: [new]")
    assert build(tmp_path, "again") == whole
    assert streamed.num_bytes < total - before + total // 4
    assert not (tmp_path / "again/quarantine.jsonl").exists()


def test_other_formats_are_downloaded_file_by_file_until_the_limit(tmp_path, hub):
    for number in range(4):
        write(hub.folder / f"main/part-{number}.jsonl.zst", *[prose(50, seed=number)] * 20)
    build(tmp_path, "some", limit=100)
    assert [name for _, name in hub.fetched] == ["part-0.jsonl.zst"] * 2  # to choose the tokenizer, and to read


# The library itself, where it is installed


def test_files_saved_by_the_library_are_read_unchanged(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [f"{number} äöü" for number in range(50)]
    whole = datasets.Dataset.from_dict({"n": list(range(50)), "text": texts})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "two")
    whole.select([7, 3, 9]).save_to_disk(tmp_path / "three")

    assert texts_of(read(tmp_path, source("one"))) == texts
    assert texts_of(read(tmp_path, source("two", split="test"))) == texts[:5]
    assert texts_of(read(tmp_path, source("three"))) == [texts[index] for index in (7, 3, 9)]


def test_splits_are_those_of_the_library(tmp_path):
    datasets = pytest.importorskip("datasets")
    layouts = [
        ["data/train-00000-of-00001.jsonl", "data/odd-00000-of-00001.jsonl", "x.jsonl"],
        ["my_train_0.jsonl", "training/a.jsonl", "dev/b.jsonl", "latest.jsonl"],
        ["a/train.jsonl", "b/train-1.jsonl", "eval.jsonl", "contest.jsonl"],
        ["one.jsonl", "sub/two.jsonl"],
    ]
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        for file in layout:
            write(folder / file, file)
        expected = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        for split in expected:
            assert sorted(texts_of(read(folder, source(split=str(split))))) == sorted(expected[split]["text"])
    shutil.rmtree(tmp_path / "cache")
