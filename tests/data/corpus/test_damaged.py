"""Whatever happens to the finished tasks of an unfinished corpus, it ends with the bytes of an undisturbed one."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from factory import DAMAGES, damage
from unspool.data.corpus import build as build_module
from unspool.data.sources import base

from .test_removed import build, killed_after_the_last_task, root, write_parts  # noqa: F401

KINDS = ["flip", *(pytest.param(kind, marks=pytest.mark.slow) for kind in DAMAGES[1:])]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> tuple[Path, Path]:
    """A folder whose corpus is complete but not published, and one where it is."""
    killed, whole = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "TASK_BYTES", 1)
        patch.setattr(build_module, "forget_engines", lambda: None)
        write_parts(killed)
        write_parts(whole)
        killed_after_the_last_task(killed)
        build(whole)
    return killed, whole


def contents(folder: Path) -> dict[str, str]:
    """Of everything that is not about where it was made."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["docs-00003.arrow", "tasks/sizes-00003.npy", "tasks/ledger-00003.json"])
def test_damage_to_a_finished_task_of_an_unfinished_corpus_is_detected(name, kind, places, root, capsys):  # noqa: F811
    killed, whole = places
    shutil.copytree(killed / "out", root / "out")
    partial = root / "out" / "books.partial"
    # Near the end, where it would change a token and not the format.
    damage(partial / name, kind, partial / name.replace("00003", "00001"), at=0.2 if "arrow" in name else 0.98)

    counts = build(root)

    assert contents(root / "out" / "books") == contents(whole / "out" / "books")
    assert counts == json.loads((whole / "out" / "books" / "manifest.json").read_text())["counts"]
    assert "unfinished work of task 3 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_without_its_checksums_is_repeated(kind, places, root, capsys):  # noqa: F811
    killed, whole = places
    shutil.copytree(killed / "out", root / "out")
    tasks = root / "out" / "books.partial" / "tasks"
    damage(tasks / "sums-00003.json", kind, tasks / "sums-00001.json")

    build(root)

    assert contents(root / "out" / "books") == contents(whole / "out" / "books")
    assert "unfinished work of task 3 is damaged" in capsys.readouterr().err


def test_intact_tasks_are_not_repeated(places, root, capsys, monkeypatch):  # noqa: F811
    killed, whole = places
    shutil.copytree(killed / "out", root / "out")
    monkeypatch.setattr(build_module.ReadDocuments, "run", lambda *args, **rest: pytest.fail("a task was repeated"))
    build(root)
    assert contents(root / "out" / "books") == contents(whole / "out" / "books")
    assert "damaged" not in capsys.readouterr().err
