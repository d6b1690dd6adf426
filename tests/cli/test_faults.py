"""A full disk, a read-only folder or an impossible locale is one sentence with exit code 2, and costs no work."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from factory import SMALL_SIZE, save_mini
from synthesis.toy import MOCK, write_documents, write_recipe
from unspool.cli.main import Commands, build_app
from unspool.core.artifacts import file_digest
from unspool.models.config import SIZES
from unspool.recipe.paths import find_bundled
from unspool.training.checkpoint import save

COMMAND = (sys.executable, "-m", "unspool.cli.main")


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        build_app()(list(args))
    return int(stop.value.code or 0)


def sentences(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines about errors; a traceback fails."""
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return [line for line in printed.splitlines() if line.startswith("error: ")]


# Without a disk of its own


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT])
def test_an_error_of_the_operating_system_is_one_line_and_exit_code_2(number, capsys):
    app = typer.Typer(cls=Commands)

    @app.command()
    def fail() -> None:
        raise OSError(number, os.strerror(number), "runs/tiny")

    @app.command()
    def other() -> None: ...

    with pytest.raises(SystemExit) as stop:
        app(["fail"])
    assert stop.value.code == 2
    (line,) = sentences(capsys)
    assert line.startswith("error: runs/tiny: ") and line.endswith(".")


def test_a_full_disk_behind_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, "recipes"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no space left on device") and done.stderr.count("\n") == 1


def under_locale(locale: dict[str, str], *args: str) -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    return subprocess.run([*COMMAND, *args], env=env | locale, capture_output=True, check=False)


def test_a_terminal_without_a_character_shows_its_escape(tmp_path):
    recipe = tmp_path / "größe.yaml"
    recipe.write_text(build_recipe())
    done = under_locale({"LC_ALL": "xx", "PYTHONIOENCODING": "ascii"}, "recipes", "check", str(recipe))
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfe.yaml: no problems found." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "xx_YY.UTF-8"},
        {"LC_ALL": "xx", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_an_impossible_locale_changes_no_text_and_no_name(locale, tmp_path):
    path = tmp_path / "größe" / "naïve.txt"
    path.parent.mkdir()
    path.write_text("naïve – 河", encoding="utf-8")
    done = under_locale(locale, "inspect", str(path), "--tokenizer", "asset:tiny-base")
    assert done.returncode == 0, done.stderr.decode()
    assert "naïve – 河".encode() in done.stdout and "größe/naïve.txt".encode() in done.stdout


def build_recipe() -> str:
    """A recipe that is valid without any file."""
    return find_bundled("tiny").path.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("one")
    page = tmp_path / "page.html"
    page.write_text("the page before")
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))

    assert run("inspect", str(tmp_path / "a.txt"), "--tokenizer", "asset:tiny-base", "--html", str(page)) == 2
    assert sentences(capsys) == [
        f"error: {page}: no space left on device; free some space and run the same command again, which continues "
        "where it stopped."
    ]
    assert page.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "page.html"]


# On a disk of its own


@dataclass(frozen=True)
class Disk:
    """A small file system in memory."""

    path: Path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)

    def fill(self) -> Path:
        path = self.path / "fill"
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
        return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("file systems can only be mounted by root")
    yield Disk(path)
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "4M", SMALL_SIZE)
        folder = tmp_path_factory.mktemp("mini")
        recipe = save_mini(folder)
        assert run("run", str(recipe), "--set", f"out={folder / 'whole'}") == 0
        yield recipe


def results(out: Path) -> dict[str, str]:
    """What a run is for. Logs hold times, and manifests versions."""
    wanted = ("docs-*", "rows-*", "model.safetensors", "samples.jsonl", "ledger.jsonl", "conversations-*")
    found = {path for pattern in wanted for path in out.rglob(pattern)}
    return {str(path.relative_to(out)): file_digest(path) for path in sorted(found)}


def check_recovery(disk: Disk, sizes: list[int], begin: Callable[[], int], whole: Path, out: Path, capsys) -> None:
    """Run on disks of so many KB, then on a large one: a sentence each time, and in the end an undisturbed result."""
    stopped = 0
    for size in sizes:
        subprocess.run(["find", str(disk.path), "-mindepth", "1", "-delete"], check=True)
        disk.remount(f"size={size}k")
        code = begin()
        lines = sentences(capsys)
        if code:
            stopped += 1
            assert code == 2 and len(lines) == 1, (size, lines)
            assert "o space left on device" in lines[0] and "free some space" in lines[0]
        disk.remount("size=64m")
        assert begin() == 0, (size, sentences(capsys))
        capsys.readouterr()
        assert results(out) == results(whole), size
        assert not list(out.rglob("*.tmp")), "something half-written is left"
    assert stopped >= len(sizes) - 1, "the disks were too large to test anything"


@pytest.mark.slow
def test_a_run_that_fills_the_disk_anywhere_is_resumed_to_the_same_result(mini, disk, capsys):
    out = disk.path / "out"
    command = ("run", str(mini), "--set", f"out={out}")
    sizes = [8, 64, 128, 700, 3500, 5700]
    check_recovery(disk, sizes, lambda: run(*command), mini.parent / "whole", out, capsys)


@pytest.mark.slow
def test_a_full_disk_in_worker_processes_is_the_same_sentence(mini, disk, capsys):
    texts = (mini.parent / "books.jsonl").read_text().splitlines(keepends=True)
    for number in range(4):  # each is a task of its own
        (mini.parent / f"part-{number}.jsonl").write_text("".join(texts[number::4]) * 900)
    sets = ("--set", "sources.books.path=part-*.jsonl", "--set", "engine.workers=2")
    whole, out = mini.parent / "parts", disk.path / "out"
    assert run("tokenize", str(mini), *sets, "--set", f"out={whole}") == 0
    check_recovery(
        disk, [900, 3000], lambda: run("tokenize", str(mini), *sets, "--set", f"out={out}"), whole, out, capsys
    )


@pytest.mark.slow
def test_synthesis_that_fills_the_disk_is_resumed_without_asking_again(tmp_path, disk, capsys):
    write_documents(tmp_path / "docs.jsonl", 40)
    recipe = write_recipe(tmp_path, {"generator": MOCK, "tokens": 20000, "per_document": 4})
    whole, out = tmp_path / "whole", disk.path / "out"
    assert run("synth", str(recipe), "--set", f"out={whole}") == 0
    sizes = [8, 100, 200, 300]
    check_recovery(disk, sizes, lambda: run("synth", str(recipe), "--set", f"out={out}"), whole, out, capsys)


def commands(recipe: Path, disk: Path) -> dict[str, list[str]]:
    """Every command that writes, to a folder of the disk."""
    made, new = disk / "run", f"out={disk / 'new'}"
    model = str(made / "stages" / "abf" / "model")
    study = recipe.parent / "study.yaml"
    study.write_text(
        f"name: s\nrecipe: {recipe}\nout: {disk / 'study'}\nseeds: [0]\nbaseline: a\narms:\n  a:\n"
        "  b: {set: {stages.abf.lr: 2e-3}}\ncompare: [niah/128]\n"
    )
    return {
        "tokenize": ["tokenize", str(recipe), "--set", new],
        "pack": ["pack", str(recipe), "--set", new],
        "train": ["train", str(recipe), "--set", new],
        "run": ["run", str(recipe), "--set", new],
        "run again": ["run", str(recipe), "--set", f"out={made}", "--set", "stages.0.lr=3e-3"],
        "eval": ["eval", model, "--suite", "key_value", "--lengths", "128", "--samples", "1", "--out", str(disk / "e")],
        "report": ["report", str(made), "--out", str(disk / "r.html")],
        "markdown": ["report", str(made), "--out", str(recipe.parent / "r.html"), "--markdown", str(disk / "r.md")],
        "export": ["export", str(made), str(disk / "x"), "--stage", "abf"],
        "rope": ["rope", "--model", model, "--context", "256", "--html", str(disk / "rope.html")],
        "inspect": ["inspect", "rows", str(made), "--html", str(disk / "i.html")],
        "study": ["study", str(study)],
        "launch": ["launch", str(recipe), "--via", "slurm", "--partition", "x", "--set", new],
    }


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_every_command_that_writes_says_so_and_leaves_what_was_there(fault, mini, disk, capsys):
    subprocess.run(["cp", "-r", str(mini.parent / "whole"), str(disk.path / "run")], check=True)
    if fault == "full":
        disk.fill()
    else:
        disk.remount("ro")
    before = results(disk.path / "run")
    for name, command in commands(mini, disk.path).items():
        assert run(*command) == 2, name
        lines = sentences(capsys)
        assert len(lines) == 1 and str(disk.path) in lines[0], (name, lines)
        wanted = "no space left on device" if fault == "full" else "read-only file system"
        assert wanted in lines[0], (name, lines)
    assert results(disk.path / "run") == before
    assert not list(disk.path.rglob("*.tmp"))


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_no_reason_to_stop(mini, disk, capsys, monkeypatch):
    """The thread that writes checkpoints warns; the stage ends with the same weights."""
    out = disk.path / "out"

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save, "_write_tensors", fail)
    assert run("run", str(mini), "--set", f"out={out}") == 0
    assert "cannot write the checkpoint of step 1" in capsys.readouterr().err
    assert results(out) == results(mini.parent / "whole")
