"""What a person sees, and that nothing else is ever disturbed by it."""

import io
import logging
import re
import subprocess
import sys

import pytest
from rich.console import Console

from unspool.core import progress
from unspool.core.progress import MAX_SECONDS, MIN_SECONDS, long_bar, progress_bar


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 80 columns that records its output."""
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=True, highlight=False, width=80))
    return file


def test_without_a_terminal_a_quick_bar_writes_nothing_and_lines_go_to_stderr():
    code = """
import logging
from unspool.core.logging import set_up_logging
from unspool.core.progress import progress_bar
set_up_logging()
with progress_bar("rows", 3) as advance:
    for _ in range(3):
        advance(1, "loss 3.1")
logging.getLogger("unspool.data").info("rows: up to date")
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
    logging.getLogger("unspool.training").info(line)
    assert screen.getvalue() == line + "\n"


def spoken(capsys, seconds_per_step, total=100):
    """Return the steps of a long job that are logged without a terminal."""
    now = 0.0
    with long_bar("stage abf", total, clock=lambda: now) as advance:
        advance(0)
        for step in range(total):
            now += seconds_per_step
            advance(1, f"loss {step}")
    return [int(line.split("/")[0].removeprefix("stage abf: ")) for line in capsys.readouterr().err.splitlines()]


def test_a_log_hears_of_the_first_and_the_last_of_a_quick_job(capsys):
    assert spoken(capsys, 0.01) == [1, 100]


def test_a_log_hears_of_every_tenth_of_a_job(capsys):
    assert spoken(capsys, MIN_SECONDS / 10) == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]


def test_a_log_of_a_slow_job_is_never_silent_for_long(capsys):
    assert spoken(capsys, MAX_SECONDS / 2) == [1, *range(3, 100, 2), 100]


def test_a_resumed_long_job_counts_from_its_last_position(capsys):
    with long_bar("stage abf", 10) as advance:
        advance(4, "")
        advance(1, "loss 3.1")
    assert capsys.readouterr().err == "stage abf: 5/10  loss 3.1\n"


def reported(capsys, calls, total):
    """Return the lines of a bar without a terminal, from (seconds, amount, note) of each call."""
    now = 0.0
    with progress_bar("score base", total, clock=lambda: now) as advance:
        for seconds, *call in calls:
            now += seconds
            advance(*call)
    return capsys.readouterr().err.splitlines()


def test_a_long_bar_without_a_terminal_logs_lines_with_the_remaining_time(capsys):
    lines = reported(capsys, [(0, 0), *[(MIN_SECONDS / 2, 5, f"unit {n}") for n in range(20)]], total=100)
    assert lines[:2] == ["score base: 10/100  unit 1  eta 4 min 30 s", "score base: 20/100  unit 3  eta 4 min 0 s"]
    assert lines[-1] == "score base: 100/100  unit 19  eta 0.0 s"
    assert len(lines) == 10


def test_what_an_earlier_run_finished_does_not_shorten_the_remaining_time(capsys):
    assert reported(capsys, [(0, 900), (MIN_SECONDS, 10, "")], total=1000) == ["score base: 910/1000  eta 4 min 30 s"]


def test_a_bar_without_a_total_has_a_count_only(capsys):
    lines = reported(capsys, [(0, 0), *[(MAX_SECONDS / 4, 5) for _ in range(5)]], total=None)
    assert lines == ["score base: 5", "score base: 25"]


def test_in_a_narrow_terminal_label_and_end_of_the_note_give_way_to_the_rest(screen):
    with long_bar("stage a-rather-long-name", 10_000) as advance:
        advance(1500, "loss 3.142  eta 1:02:33  74.2K tok/s  MFU 43%  72.3 GiB")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).split("\r")
    # The bar is drawn again by the clock, too.
    last = [line for line in shown if "1500" in line][-1]
    assert "stage a-" in last
    assert "1500/10000 loss 3.142  eta 1:02:33  74.2K tok/s" in last
    assert len(last.rstrip()) <= 80


def test_as_a_library_nothing_is_printed_unless_logging_is_configured():
    code = """
import logging
from unspool.core.progress import long_bar
with long_bar("stage abf", 1) as advance:
    advance(1, "loss 3.1")
logging.getLogger("unspool.training").warning("a warning")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(("options", "shown"), [([], 1), (["-v"], 2), (["--quiet"], 0)])
def test_verbose_and_quiet_set_the_log_level(options, shown, capsys):
    import typer
    from typer.main import get_command

    from unspool.cli.main import build_app, unspool

    unspool(typer.Context(get_command(build_app())), verbose="-v" in options, quiet="--quiet" in options)
    logging.getLogger("unspool.training").debug("a detail")
    logging.getLogger("unspool.training").info("a step")
    logging.getLogger("unspool.training").warning("a warning")
    assert len(capsys.readouterr().err.splitlines()) == 1 + shown
