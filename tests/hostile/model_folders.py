"""Shared by the tests of hostile models: commands that read a model folder, and their expected messages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from unspool.cli.main import build_app

TEXT = "the river runs past the old mill and the bridge " * 40

Damage = Callable[[Path], None]


def run(*words: Any) -> Result:
    return CliRunner().invoke(build_app(), [*map(str, words)])


def evaluate(folder: Path, out: str = "scores") -> Result:
    options = ("--lengths", 32, "--samples", 1, "--text", folder.parent / "text.txt", "--device", "cpu")
    return run("eval", folder, "--suite", "perplexity", *options, "--out", folder.parent / out)


def check_sentence(done: Result, said: str) -> None:
    """One line that a user can act on, exit code 2 and no traceback."""
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert (done.exit_code, len(lines)) == (2, 1), done.output
    assert said in lines[0]
    assert lines[0].endswith(".")
    assert "Traceback" not in done.output


def content(name: str, value: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(value) and None
