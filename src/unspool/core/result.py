"""What public functions return: an object that prints itself to a terminal, as text and in a notebook."""

import io
from abc import ABC, abstractmethod

from rich.console import Console

from unspool.core.console import PlainConsole
from unspool.core.html import element

TEXT_WIDTH = 120  # columns of a result as text


class Result(ABC):
    """A result whose `str` is what the command prints."""

    @abstractmethod
    def print(self, console: Console) -> None:
        """Print the result to a `rich` console."""

    def table(self) -> str:
        """Return what `print` prints, as text."""
        out = io.StringIO()
        self.print(PlainConsole(file=out, width=TEXT_WIDTH))
        return out.getvalue()

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str | None:
        return element("pre", self.table())
