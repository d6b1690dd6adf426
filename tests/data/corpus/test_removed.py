"""A removal that is killed leaves nothing that a later run takes for work."""

import json
import os
import shutil
from pathlib import Path

import pytest

from factory import die, dying_at, in_child
from unspool.core import artifacts
from unspool.core.artifacts import read_manifest
from unspool.data.corpus import executors
from unspool.data.corpus.build import build_corpus
from unspool.data.corpus.config import EngineConfig
from unspool.data.corpus.store import open_corpus
from unspool.data.sources import base
from unspool.data.sources.jsonl import JsonlSource

from ..conftest import build_tokenizer, prose

FILES, DOCUMENTS = 6, 5


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(base, "TASK_BYTES", 1)  # every file is a task
    for number in range(FILES):
        texts = [prose(20, seed=100 * number + document) for document in range(DOCUMENTS)]
        (tmp_path / f"part-{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def build(root: Path, **source) -> dict:
    return build_corpus(
        JsonlSource(kind="jsonl", path="part-*.jsonl", **source),
        root / "out" / "books",
        tokenizer=build_tokenizer(),
        root=root,
        engine=EngineConfig(workers=1),
        seed=0,
    )


def killed_after_the_last_task(root: Path) -> None:
    """Every task is complete, and nothing is published."""

    def work() -> None:
        real = executors.LocalTasks.run

        def run(self) -> None:
            real(self)
            die()

        executors.LocalTasks.run = run
        build(root)

    assert in_child(work) == -9
    assert len([*(root / "out" / "books.partial").glob("docs-*.arrow")]) == FILES


@pytest.mark.parametrize("number", [1, 3, 5, 7, 9, 12])
def test_a_kill_inside_of_a_removal_does_not_let_the_old_recipe_take_the_rest_for_complete(number, root, monkeypatch):
    """The manifest would count documents that are not there, and training would go on."""
    killed_after_the_last_task(root)

    def another_recipe() -> None:
        # What is left of other work is removed now, and its files go one by one.
        monkeypatch.setattr(os, "unlink", dying_at(os.unlink, number))
        build(root, text="other")

    shutil.rmtree(root / "out" / "books.partial.previous", ignore_errors=True)
    assert in_child(another_recipe) in (-9, 1)

    counts = build(root)

    assert counts["documents"] == len(open_corpus(root / "out" / "books")) == FILES * DOCUMENTS
    manifest = read_manifest(root / "out" / "books")
    assert manifest is not None
    assert len([name for name in manifest["files"] if name.startswith("docs-")]) == FILES


def test_a_removal_that_was_killed_is_finished_by_the_next_run(root, monkeypatch, tmp_path):
    trash = tmp_path / "out" / "books.partial"
    trash.mkdir(parents=True)
    (trash / "big").write_text("…")

    def work() -> None:
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: die())
        artifacts.remove(trash)

    assert in_child(work) == -9
    (left,) = (tmp_path / "out").iterdir()
    assert left.name.endswith(artifacts.REMOVED)

    build(root)

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["books"]


def test_a_manifest_that_lists_no_files_is_not_complete(root):
    build(root)
    path = root / "out" / "books" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"], manifest["sha256"]
    path.write_text(json.dumps(manifest))
    assert artifacts.find_damage(root / "out" / "books") == "its manifest lists no files"
    assert build(root)["documents"] == FILES * DOCUMENTS
    assert artifacts.find_damage(root / "out" / "books") is None


def test_a_changed_count_in_a_manifest_is_noticed(root):
    build(root)
    path = root / "out" / "books" / "manifest.json"
    path.write_text(
        path.read_text().replace(f'"documents": {FILES * DOCUMENTS}', f'"documents": {FILES * DOCUMENTS + 1}')
    )
    assert build(root)["documents"] == FILES * DOCUMENTS
