"""Printed text cannot control the terminal, and JSON keeps the exact values."""

import io
import json
import sys

import pytest
from rich.table import Table
from rich.text import Text

from unspool.core.console import PlainConsole, escaped_streams, print_json
from unspool.core.formatting import printable
from unspool.core.progress import progress_bar

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\u202e\u2066\u200b\u2028\ud800"
UNSAFE = set("\x1b\x07\x9b\x7f\r\u202e\u2066\u200b\u2028\ud800")


def is_safe(text: str) -> bool:
    return UNSAFE.isdisjoint(text)


def test_every_character_that_acts_is_replaced_and_others_stay():
    assert is_safe(printable(EVIL))
    assert printable("a\tb\nnaïve 河 🦫‍") == "a\tb\nnaïve 河 🦫‍"
    assert printable(printable(EVIL)) == printable(EVIL)


@pytest.mark.parametrize("colors", [False, True])
def test_a_console_escapes_texts_cells_and_markup(colors):
    screen = io.StringIO()
    console = PlainConsole(file=screen, width=200, force_terminal=colors)
    table = Table("[red]name[/red]", title=EVIL)
    table.add_row(EVIL + "[bold]cell[/bold] :smile:")
    console.print(EVIL, "[link=https://evil]click[/link]")
    console.print(Text(EVIL, style="bold"))
    console.print(table)
    shown = screen.getvalue()

    for kept in ("[link=https://evil]click[/link]", "[bold]cell[/bold]", ":smile:", "[red]name[/red]", "␛]0;owned␇"):
        assert kept in shown
    own = shown.replace("\x1b[1m", "").replace("\x1b[3m", "").replace("\x1b[0m", "").replace("\x1b[1;1m", "")
    assert is_safe(own), "only the console's own styles may be sequences"


def test_everything_that_a_command_prints_is_escaped(capsys):
    with escaped_streams():
        print(EVIL)
        sys.stdout.writelines([EVIL, "\n"])
        print(EVIL, file=sys.stderr)
    printed = capsys.readouterr()
    assert is_safe(printed.out) and printed.out.count("owned") == 2
    assert is_safe(printed.err) and printed.err.count("owned") == 1
    assert sys.stdout.write("") == 0, "the streams are as they were"


def test_progress_bars_of_other_libraries_still_move(capsys):
    with escaped_streams():
        sys.stderr.write("\r 10%|█   |")
        sys.stderr.write("\n\x1b[A")
        sys.stderr.write("\r\x1b[2J")
    assert capsys.readouterr().err == "\r 10%|█   |\n\x1b[A\r␛[2J"


def test_json_is_safe_to_print_and_exact(capsys):
    value = {"text": EVIL + "naïve 河", EVIL: [1]}
    with escaped_streams():
        print_json(value)
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert json.loads(printed) == value
    assert "naïve 河" in printed


def test_an_encoding_without_a_character_prints_an_escape(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="strict"))
    with escaped_streams():
        print("two – dashes")
        print_json({"text": "河"})
        sys.stdout.flush()
    assert raw.getvalue() == b'two \\u2013 dashes\n{\n "text": "\\u6cb3"\n}\n'


def test_a_bar_does_not_read_markup(monkeypatch):
    screen = io.StringIO()
    console = PlainConsole(file=screen, width=120, force_terminal=True)
    monkeypatch.setattr("unspool.core.progress.console", console)
    with progress_bar("[red]label[/red]" + EVIL, 2) as advance:
        advance(1, "[link=https://evil]note[/link]")
    assert "[red]label[/red]" in screen.getvalue()
    assert "]8;" not in screen.getvalue() and "\x07" not in screen.getvalue()
