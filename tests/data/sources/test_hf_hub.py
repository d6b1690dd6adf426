"""Datasets from the Hub, which is played by a folder, and beside the library itself."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from unspool.core.errors import ConfigError

from .hf_folders import card, read, source, texts_of, write


class FakeHub:
    """Two calls of huggingface_hub, answered from folders: one per revision."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.fetched: list[tuple[str, str]] = []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)

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

    def download(self, name: str, filename: str, *, repo_type: str, revision: str) -> str:
        assert (name, repo_type) == ("org/name", "dataset")
        self.fetched.append((revision, filename))
        return str(self.revision(revision) / filename)


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
    assert hub.fetched == [
        ("main-commit", "README.md"),
        ("main-commit", "data/train-00000-of-00002.parquet"),
        ("main-commit", "data/train-00001-of-00002.parquet"),
    ]


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


def test_the_parquet_copy_never_stands_in_for_a_revision(tmp_path, hub):
    (hub.folder / "v1").mkdir(parents=True)
    (hub.folder / "v1/train.csv").touch()
    write(hub.folder / "refs-convert-parquet/default/train/0000.parquet", "newest")
    with pytest.raises(ConfigError, match="holds no Parquet, JSONL or Arrow files for split 'train'"):
        source("org/name", revision="v1").units(tmp_path)


def test_without_the_hub_one_sentence_says_what_to_do(tmp_path, hub):
    with pytest.raises(ConfigError, match="hf download --repo-type dataset org/name --local-dir") as caught:
        source("org/name").units(tmp_path)
    assert "404" in str(caught.value) and "\n" not in str(caught.value)


def test_a_name_the_hub_does_not_know_is_told_from_a_missing_network(tmp_path, hub, monkeypatch):
    def unknown(*_: Any, **__: Any) -> None:
        raise RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(hub, "dataset_info", unknown)
    with pytest.raises(ConfigError, match="no such dataset 'org/name' on the Hub; check the name"):
        source("org/name").units(tmp_path)


def test_a_folder_goes_before_the_hub(tmp_path, hub):
    write(tmp_path / "org/name/a.jsonl", "local")
    assert texts_of(read(tmp_path, source("org/name"))) == ["local"]
    assert hub.fetched == []


# The library itself, where it is installed


def test_what_the_library_saves_is_what_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [f"{number} äöü" for number in range(50)]
    whole = datasets.Dataset.from_dict({"n": list(range(50)), "text": texts})
    whole.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "two")
    whole.select([7, 3, 9]).save_to_disk(tmp_path / "three")

    assert texts_of(read(tmp_path, source("one"))) == texts
    assert texts_of(read(tmp_path, source("two", split="test"))) == texts[:5]
    assert texts_of(read(tmp_path, source("three"))) == [texts[index] for index in (7, 3, 9)]


def test_splits_come_out_as_in_the_library(tmp_path):
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
