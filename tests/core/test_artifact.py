"""Artifacts are complete or absent after any failure, and stale ones are detected."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from unspool import __version__
from unspool.core import artifacts
from unspool.core.artifacts import (
    MANIFEST,
    REMOVED,
    check_writable,
    digest,
    file_digest,
    folder_digest,
    open_work,
    publish,
    read_manifest,
    remove,
    seal,
    stale_reason,
    write_atomic,
)
from unspool.core.errors import ConfigError

INPUTS = {"corpus books": "abc", "tokenizer": "def"}
SETTINGS = {"rows": {"length": 64, "packing": "single_doc"}, "seed": 0}
IDENTITY: dict[str, Any] = {"kind": "rows", "inputs": INPUTS, "settings": SETTINGS}


def make(out_dir: Path, text: str = "one") -> None:
    with publish(out_dir, **IDENTITY) as draft:
        (draft.folder / "data.txt").write_text(text)
        (draft.folder / "model").mkdir()
        (draft.folder / "model" / "weights").write_text(text * 2)
        draft.counts["rows"] = 3


def text_of(out_dir: Path) -> str:
    return (out_dir / "data.txt").read_text()


def with_manifest(out_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = read_manifest(out_dir)
    assert manifest is not None
    del manifest["sha256"]  # as older versions wrote it
    change(manifest)
    (out_dir / MANIFEST).write_text(json.dumps(manifest))


# Publishing


def test_the_manifest_records_inputs_settings_and_files(tmp_path):
    make(tmp_path / "rows")

    manifest = read_manifest(tmp_path / "rows")
    assert manifest is not None
    assert manifest["kind"] == "rows"
    assert manifest["unspool"] == __version__
    assert (manifest["inputs"], manifest["settings"], manifest["counts"]) == (INPUTS, SETTINGS, {"rows": 3})
    assert manifest["files"] == {
        name: {"bytes": size, "sha256": file_digest(tmp_path / "rows" / name)}
        for name, size in (("data.txt", 3), ("model/weights", 6))
    }


def test_the_final_name_does_not_exist_before_the_work_is_done(tmp_path):
    with publish(tmp_path / "rows", **IDENTITY) as draft:
        (draft.folder / "data.txt").write_text("half")
        assert not (tmp_path / "rows").exists()
        assert draft.folder == tmp_path / "rows.partial"
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_an_error_publishes_nothing(tmp_path):
    with pytest.raises(ValueError, match="broken"), publish(tmp_path / "rows", **IDENTITY) as draft:
        (draft.folder / "data.txt").write_text("half")
        raise ValueError("broken")
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "not built yet"


def test_an_error_leaves_the_earlier_folder_as_it_was(tmp_path):
    make(tmp_path / "rows", "old")
    with pytest.raises(ValueError, match="broken"), publish(tmp_path / "rows", **IDENTITY):
        raise ValueError("broken")
    assert stale_reason(tmp_path / "rows", **IDENTITY) is None
    assert text_of(tmp_path / "rows") == "old"


def test_publishing_again_replaces_the_folder_and_keeps_nothing_of_it(tmp_path):
    make(tmp_path / "rows", "old")
    (tmp_path / "rows" / "stray").write_text("left behind")
    make(tmp_path / "rows", "new")
    assert text_of(tmp_path / "rows") == "new"
    assert not (tmp_path / "rows" / "stray").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_work_of_a_killed_process_is_neither_a_result_nor_mixed_into_the_next(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from unspool.core.artifacts import publish
with publish(Path({str(tmp_path / "rows")!r}), kind="rows", inputs={{}}, settings={{}}) as draft:
    (draft.folder / "stray").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "rows.partial" / "stray").exists(), "the process died too early to test anything"
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "not built yet"

    make(tmp_path / "rows")
    assert stale_reason(tmp_path / "rows", **IDENTITY) is None
    assert not (tmp_path / "rows" / "stray").exists()


class Killed(BaseException):
    """Stands for a kill: nothing catches it, nothing is cleaned up."""


@contextmanager
def kill_at(moment: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Die at the `moment`-th change of a name or removal of a folder; of the folder one file is gone by then."""
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < moment:
                return real(path, *args, **kwargs)
            if real is rmtree and path.is_dir():
                next(file for file in path.rglob("*") if file.is_file()).unlink()
            raise Killed

        return call

    rmtree = artifacts.shutil.rmtree
    patch.setattr(artifacts.shutil, "rmtree", dying(rmtree))
    patch.setattr(Path, "rename", dying(Path.rename))
    patch.setattr(Path, "replace", dying(Path.replace))
    yield
    assert calls >= moment, "not reached"


# Replacing takes: rename and remove an old draft, write the manifest, remove an old leftover, two renames, remove the
# old folder.
@pytest.mark.parametrize("moment", range(1, 8))
def test_killed_at_any_step_of_replacing_neither_the_old_folder_nor_the_new_one_is_lost(moment, tmp_path, monkeypatch):
    make(tmp_path / "rows", "old")
    make(tmp_path / "draft", "draft")
    (tmp_path / "draft").rename(tmp_path / "rows.partial")
    with monkeypatch.context() as patch, pytest.raises(Killed), kill_at(moment, patch):
        make(tmp_path / "rows", "new")

    assert stale_reason(tmp_path / "rows", **IDENTITY) is None, "the old one or the new one was lost"
    assert text_of(tmp_path / "rows") in ("old", "new")
    assert not (tmp_path / "rows.old").exists()
    make(tmp_path / "rows", "newer")
    assert stale_reason(tmp_path / "rows", **IDENTITY) is None
    assert text_of(tmp_path / "rows") == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("mended_by", [lambda out: stale_reason(out, **IDENTITY), lambda out: make(out, "newer")])
def test_between_the_two_renames_the_finished_draft_takes_the_place(mended_by, tmp_path):
    for text, name in (("old", "rows.old"), ("new", "rows.partial")):
        make(tmp_path / text, text)
        (tmp_path / text).rename(tmp_path / name)

    mended_by(tmp_path / "rows")

    assert text_of(tmp_path / "rows") in ("new", "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_the_old_folder_is_restored_if_the_new_one_is_unfinished_or_missing(tmp_path):
    make(tmp_path / "rows", "old")
    (tmp_path / "rows").rename(tmp_path / "rows.old")
    (tmp_path / "rows.partial").mkdir()

    assert stale_reason(tmp_path / "rows", **IDENTITY) is None
    assert text_of(tmp_path / "rows") == "old"


def test_there_is_no_eighth_step_of_replacing(tmp_path, monkeypatch):
    make(tmp_path / "rows", "old")
    (tmp_path / "rows.partial").mkdir()
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="not reached"), kill_at(8, patch):
        make(tmp_path / "rows", "new")


def test_a_draft_with_a_manifest_is_still_no_result(tmp_path):
    make(tmp_path / "rows")
    (tmp_path / "rows").rename(tmp_path / "rows.partial")
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "not built yet"


def test_a_work_folder_can_be_sealed_under_another_name(tmp_path):
    (tmp_path / "base.work").mkdir()
    (tmp_path / "base.work" / "samples.jsonl").write_text("{}\n")
    seal(tmp_path / "base.work", tmp_path / "base", **IDENTITY, counts={"samples": 1})
    assert stale_reason(tmp_path / "base", **IDENTITY) is None
    assert not (tmp_path / "base.work").exists()


# Stale or not


def test_leftovers_of_a_killed_write_are_not_published(tmp_path):
    work = tmp_path / "x.partial"
    work.mkdir()
    (work / "data").write_text("1")
    (work / "manifest.json.tmp").write_text("{")
    artifacts.seal(work, tmp_path / "x", kind="test", inputs={}, settings={}, counts={})
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["data", "manifest.json"]
    assert artifacts.find_damage(tmp_path / "x") is None


def test_the_same_inputs_and_settings_are_up_to_date_in_any_order_and_spelling(tmp_path):
    with publish(tmp_path / "a", kind="rows", inputs={}, settings={"length": (128, 256), "hops": {2: 0.5, 3: 0.5}}):
        pass
    settings = {"hops": {"3": 0.5, "2": 0.5}, "length": [128, 256]}  # as JSON gives them back
    assert stale_reason(tmp_path / "a", kind="rows", inputs={}, settings=settings) is None


@pytest.mark.parametrize(
    ("inputs", "settings", "reason"),
    [
        (INPUTS | {"tokenizer": "xyz"}, SETTINGS, "changed inputs: tokenizer"),
        (INPUTS | {"corpus wiki": "xyz"}, SETTINGS, "changed inputs: corpus wiki"),
        ({"tokenizer": "def"}, SETTINGS, "changed inputs: corpus books"),
        (INPUTS, SETTINGS | {"seed": 1}, "changed settings: seed"),
        (INPUTS, {"rows": {"length": 128, "packing": "single_doc"}, "seed": 1}, "changed settings: rows, seed"),
    ],
)
def test_a_change_is_named(inputs, settings, reason, tmp_path):
    make(tmp_path / "rows")
    assert stale_reason(tmp_path / "rows", kind="rows", inputs=inputs, settings=settings) == reason


def test_a_folder_of_another_kind_or_format_is_stale(tmp_path, monkeypatch):
    make(tmp_path / "rows")
    another = "it has another format version"
    assert stale_reason(tmp_path / "rows", **(IDENTITY | {"kind": "corpus"})) == another
    monkeypatch.setattr(artifacts, "FORMAT", artifacts.FORMAT + 1)
    assert stale_reason(tmp_path / "rows", **IDENTITY) == another


def test_another_version_of_the_package_alone_changes_nothing(tmp_path):
    make(tmp_path / "rows")
    with_manifest(tmp_path / "rows", lambda manifest: manifest.update(unspool="0.0.0"))
    assert stale_reason(tmp_path / "rows", **IDENTITY) is None


@pytest.mark.parametrize("content", [None, "", "{", "[1, 2]", "null"])
def test_a_missing_or_broken_manifest_means_that_the_folder_is_redone(content, tmp_path):
    make(tmp_path / "rows")
    (tmp_path / "rows" / MANIFEST).unlink()
    if content is not None:
        (tmp_path / "rows" / MANIFEST).write_text(content)
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "its manifest is missing or unreadable"


@pytest.mark.parametrize("files", [None, [], "data.txt"])
def test_a_manifest_that_lists_no_files_is_not_complete(files, tmp_path):
    make(tmp_path / "rows")
    with_manifest(tmp_path / "rows", lambda manifest: manifest.update(files=files))
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "its manifest lists no files"


def test_a_changed_count_in_a_manifest_is_detected(tmp_path):
    make(tmp_path / "rows")
    path = tmp_path / "rows" / MANIFEST
    path.write_text(path.read_text().replace('"rows": 3', '"rows": 4'))
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "its manifest has changed"


# Removal and unfinished work


def test_a_killed_removal_leaves_no_half_of_a_folder_under_its_name(tmp_path, monkeypatch):
    make(tmp_path / "rows")
    (tmp_path / "rows").rename(tmp_path / "rows.partial")
    with monkeypatch.context() as patch, pytest.raises(Killed), kill_at(2, patch):
        remove(tmp_path / "rows.partial")
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(REMOVED)

    make(tmp_path / "rows")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def work_on(work: Path, key: str) -> str | None:
    """Open a work folder for `key`, and return what earlier work on it has left."""
    open_work(work, key, label="box", describe=lambda folder: describe(folder / "done"))
    return describe(work / "done")


def describe(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def test_work_for_another_key_is_kept_for_one_generation_and_restored(tmp_path, capsys):
    work = tmp_path / "box.work"
    assert work_on(work, "a") is None
    (work / "done").write_text("3 steps")
    assert work_on(work, "a") == "3 steps"
    assert capsys.readouterr().err == ""

    assert work_on(work, "b") is None
    assert "box: not using the unfinished work in box.work (3 steps)" in capsys.readouterr().err
    assert work_on(work, "a") == "3 steps", "b had done nothing, so nothing is lost"
    assert capsys.readouterr().err == ""
    assert work_on(work, "b") is None
    (work / "done").write_text("5 steps")
    assert work_on(work, "a") == "3 steps"
    assert work_on(work, "b") == "5 steps"
    capsys.readouterr()
    assert work_on(work, "c") is None
    said = capsys.readouterr().err
    assert "(5 steps)" in said and "3 steps of older work there is deleted" in said


@pytest.mark.parametrize("moment", range(1, 6))
def test_killed_at_any_rename_no_work_is_lost(moment, tmp_path, monkeypatch):
    work = tmp_path / "box.work"
    for key in ("a", "b"):
        work_on(work, key)
        (work / "done").write_text(f"work of {key}")
    with monkeypatch.context() as patch:
        try:
            with kill_at(moment, patch):
                work_on(work, "a")
        except (Killed, AssertionError):
            pass
    assert work_on(work, "a") == "work of a"
    assert work_on(work, "b") == "work of b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box.work", "box.work.previous"]


# Damage


def test_a_removed_file_is_detected(tmp_path):
    make(tmp_path / "rows")
    (tmp_path / "rows" / "model" / "weights").unlink()
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "file model/weights is missing or has another size"


def test_a_truncated_file_is_detected(tmp_path):
    make(tmp_path / "rows")
    (tmp_path / "rows" / "data.txt").write_text("on")
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "file data.txt is missing or has another size"


def test_changed_content_of_the_same_size_is_detected(tmp_path):
    make(tmp_path / "rows")
    (tmp_path / "rows" / "data.txt").write_text("onf")
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "file data.txt has changed"


def test_above_the_checksum_limit_only_names_and_sizes_are_compared(tmp_path, monkeypatch):
    make(tmp_path / "rows")
    monkeypatch.setattr(artifacts, "CHECKSUM_LIMIT", 8)  # the folder holds 9 bytes
    monkeypatch.setattr(artifacts, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    assert stale_reason(tmp_path / "rows", **IDENTITY) is None
    (tmp_path / "rows" / "data.txt").write_text("on")
    assert stale_reason(tmp_path / "rows", **IDENTITY) == "file data.txt is missing or has another size"


# Files and hashes


def test_a_file_is_replaced_in_one_step_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    write_atomic(path, "old: ä\n")
    with monkeypatch.context() as patch, pytest.raises(Killed), kill_at(1, patch):
        write_atomic(path, "new: ö\n")
    assert path.read_text(encoding="utf-8") == "old: ä\n"
    write_atomic(path, "new: ö\n")
    assert path.read_bytes() == "new: ö\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_digest_depends_on_values_and_not_on_the_order_of_keys():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    assert digest({"a": 1}) != digest({"a": 2})


@pytest.mark.parametrize("change", ["content", "name", "more"])
def test_a_folder_digest_depends_on_names_and_contents_wherever_the_folder_is(change, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "below" / "file").write_text("text")
    assert folder_digest(tmp_path / "one") == folder_digest(tmp_path / "two")

    file = tmp_path / "two" / "below" / "file"
    if change == "content":
        file.write_text("tex7")
    elif change == "name":
        file.rename(file.with_name("other"))
    else:
        (tmp_path / "two" / "more").write_text("")
    assert folder_digest(tmp_path / "one") != folder_digest(tmp_path / "two")


def test_a_file_in_a_new_folder_can_be_written_and_nothing_is_made(tmp_path):
    check_writable(tmp_path / "a" / "b", "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_below_a_file_or_in_a_forbidden_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^out {tmp_path}/file/x: {tmp_path}/file is a file, not a folder"):
        check_writable(tmp_path / "file" / "x", "out")
    monkeypatch.setattr("os.access", lambda path, mode: not (path == tmp_path and mode & os.W_OK))
    with pytest.raises(ConfigError, match=rf"^out {tmp_path}/new/x: no permission to write into {tmp_path};"):
        check_writable(tmp_path / "new" / "x", "out")
