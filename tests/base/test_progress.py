"""What a person sees, and that nothing else is ever disturbed by it."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from unspool.base import progress
from unspool.base.progress import progress_bar, say


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 80 columns that keeps what is written to it."""
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=True, highlight=False, width=80))
    return file


def test_without_a_terminal_a_bar_writes_nothing_and_lines_go_to_stderr():
    code = """
from unspool.base.progress import progress_bar, say
with progress_bar("rows", 3) as advance:
    for _ in range(3):
        advance(1, "loss 3.1")
say("rows: up to date")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "rows: up to date\n")


def test_on_a_terminal_the_bar_shows_label_count_and_note(screen):
    with progress_bar("stage abf", 4) as advance:
        advance(3, "loss 3.14")
    shown = screen.getvalue()
    assert "stage abf" in shown
    assert "3/4" in shown
    assert "loss 3.14" in shown


def test_a_finished_bar_is_wiped_from_the_terminal(screen):
    with progress_bar("rows", 1) as advance:
        advance(1)
    erase_line = "\x1b[2K"
    assert screen.getvalue().rindex(erase_line) > screen.getvalue().rindex("rows")


def test_an_error_passes_through_a_bar(screen):
    with pytest.raises(ValueError, match="broken"), progress_bar("rows", None) as advance:
        advance(1)
        raise ValueError("broken")


def test_a_line_is_printed_as_it_is(screen):
    line = "stage [bold]: " + "a long reason " * 20
    say(line)
    assert screen.getvalue() == line + "\n"
