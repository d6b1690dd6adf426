"""Printing: text from files, models and servers cannot control the terminal.

Visible signs replace control characters and invisible ones: in `rich` consoles and, while a command runs, in everything
written to stdout and stderr. JSON keeps them as escapes, so that a program reads the exact text.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from unspool.core.formatting import UNPRINTABLE, printable

# How progress bars of other libraries move on stderr: back to the start of their line, or up.
_MOVES = re.compile(r"(\n|\x1b\[A)+")


class PlainConsole(Console):
    """A `rich` console that ignores markup, emoji codes and control sequences in the text it prints."""

    def __init__(self, *, highlight: bool = False, **options: Any) -> None:
        super().__init__(highlight=highlight, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)  # before columns are measured

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def print_json(value: Any) -> None:
    """Print `value` as JSON; unprintable characters become escapes, such as `\\u001b`."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(value, indent=1, ensure_ascii=not is_unicode)
    # Such characters occur only inside JSON strings.
    print(UNPRINTABLE.sub(lambda found: "\\u007f" if found[0] == "\x7f" else json.dumps(found[0])[1:-1], text))


class _EscapedStream:
    """A text stream that replaces control characters; `rich` consoles write to the stream behind it."""

    def __init__(self, stream: TextIO, *, has_bars: bool) -> None:
        self.rich_proxied_file = stream
        self._has_bars = has_bars

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(self._escape(text))

    def _escape(self, text: str) -> str:
        if not self._has_bars:
            return printable(text)
        if _MOVES.fullmatch(text):
            return text
        inner = text.strip("\r")
        start = len(text) - len(text.lstrip("\r"))
        return text[:start] + printable(inner) + text[start + len(inner) :]

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)  # bytes would not be escaped
        return getattr(self.rich_proxied_file, name)


@contextmanager
def escaped_streams() -> Iterator[None]:
    """Escape everything printed in this block, including characters that the terminal's encoding lacks."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    stdout, stderr = (_EscapedStream(stream, has_bars=stream is sys.stderr) for stream in before)
    sys.stdout, sys.stderr = stdout, stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
