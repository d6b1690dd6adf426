"""A removal that is killed leaves nothing that a later run takes for work."""

import json
import os
import shutil
from pathlib import Path

import pytest

from factory import die, dying_at, in_child
from unspool.core import artifacts
from unspool.core.artifacts import read_manifest
from unspool.data.corpus import build as build_module
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
    monkeypatch.setattr(build_module, "forget_engines", lambda: None)  # most of the time of so small a build
    write_parts(tmp_path)
    return tmp_path


def write_parts(root: Path) -> None:
    for number in range(FILES):
        texts = [prose(20, seed=100 * number + document) for document in range(DOCUMENTS)]
        texts += [""] * number  # so that the ledgers of all tasks differ
        (root / f"part-{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


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


# Which of them meets a file of documents while the list of completed tasks is still there depends on the disk.
@pytest.mark.parametrize("number", [3, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 5, 7, 9, 12))])
def test_a_kill_inside_of_a_removal_does_not_let_the_old_recipe_take_the_rest_for_complete(number, root, monkeypatch):
    """The manifest would count documents that are not there, and training would go on."""
    killed_after_the_last_task(root)

    def another_recipe() -> None:
        # Leftovers of other work are removed now, file by file.
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
