"""What public functions return: an object that prints itself, saves itself, and shows itself in a notebook."""

import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from unspool.core.config import lookup
from unspool.core.console import PlainConsole
from unspool.core.errors import ConfigError
from unspool.core.html import element, embedded, write_text

TEXT_WIDTH = 120  # columns of a result as text
FORMATS = {".html": "html", ".htm": "html", ".md": "markdown", ".svg": "svg", ".json": "json"}


class Result(ABC):
    """A result whose `str` is what the command prints."""

    @abstractmethod
    def print(self, console: Console) -> None:
        """Print the result to a `rich` console."""

    @abstractmethod
    def to_dict(self) -> Any:
        """Return every number as plain values."""

    def renderers(self) -> Mapping[str, Callable[[], str]]:
        """The formats that `save` can write besides JSON, each with a function that returns the text."""
        return {}

    def table(self) -> str:
        """Return what `print` prints, as text."""
        out = io.StringIO()
        self.print(PlainConsole(file=out, width=TEXT_WIDTH))
        return out.getvalue()

    def save(self, path: str | Path, format: str | None = None) -> Path:
        """Write the result to a file and return its path.

        The format is `json` or, where the result has them, `html`, `markdown` or `svg`; by default what the file name
        ends in.
        """
        path = Path(path)
        known: dict[str, Callable[[], str]] = {
            **self.renderers(),
            "json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
        }
        kind = format or FORMATS.get(path.suffix.lower())
        if kind is None:
            endings = ", ".join(ending for ending, name in FORMATS.items() if name in known)
            raise ConfigError(f"{path}: the file name ends in none of {endings}; rename it, or give `format`.")
        render = lookup(known, kind, kind="`format`")
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name the file to write.")
        write_text(path, render())
        return path

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str | None:
        page = self.renderers().get("html")
        return str(element("pre", self.table())) if page is None else embedded(page())
