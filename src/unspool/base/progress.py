"""What a person sees while waiting: a bar with ETA on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Progress goes to stderr, so that `--json` on stdout stays clean.
console = Console(stderr=True, highlight=False)


class Advance(Protocol):
    """Called with how many more are done, and a short note such as the current loss."""

    def __call__(self, amount: int, note: str = "", /) -> None: ...


def say(text: str) -> None:
    """One line about what happens, for people; never needed to understand the result."""
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(label: str, total: int | None) -> Iterator[Advance]:
    """A bar that vanishes when done; silent when stderr is not a terminal."""
    if not console.is_terminal:
        yield _ignore
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=total, note="")

        def advance(amount: int, note: str = "", /) -> None:
            progress.update(task, advance=amount, note=note)

        yield advance


def _ignore(amount: int, note: str = "", /) -> None:
    """Nobody is watching."""
