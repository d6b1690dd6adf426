"""What a person sees while waiting: a bar with ETA on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

# Progress goes to stderr, so that `--json` on stdout stays clean.
console = Console(stderr=True, highlight=False)
# Where nobody has a terminal a long job says a line at every such part of it, but not more often than this many
# seconds, and at the latest after so many: enough to see in a log that it lives, and when it stopped.
LINES = 10
SOONEST, LATEST = 30.0, 300.0
# Columns below which the bar itself gives way to what is written beside it.
NARROW = 110


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
    with _live_bar(columns, label, total) as advance:
        yield advance


@contextmanager
def long_bar(label: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """A bar for hours, whose notes say all there is to say; where there is no terminal, a line now and then."""
    if not console.is_terminal:
        yield _Lines(label, total, clock)
        return
    bar = (BarColumn(bar_width=None),) if console.width >= NARROW else ()
    # Too long a note is cut at its end; the count stays whole.
    count = MofNCompleteColumn(table_column=Column(min_width=2 * len(str(total)) + 1, no_wrap=True))
    columns = (TextColumn("{task.description}"), *bar, count, TextColumn("{task.fields[note]}"))
    with _live_bar(columns, label, total, expand=True) as advance:
        yield advance


@contextmanager
def _live_bar(
    columns: tuple[ProgressColumn, ...], label: str, total: int | None, *, expand: bool = False
) -> Iterator[Advance]:
    with Progress(*columns, console=console, transient=True, expand=expand) as progress:
        task = progress.add_task(label, total=total, note="")

        def advance(amount: int, note: str = "", /) -> None:
            progress.update(task, advance=amount, note=note)

        yield advance


class _Lines:
    """Says the note that comes first, the last one, and some between."""

    def __init__(self, label: str, total: int, clock: Callable[[], float]) -> None:
        self._label, self._total, self._clock = label, total, clock
        self._done = 0
        self._said: tuple[int, float] | None = None  # how many were done, and when

    def __call__(self, amount: int, note: str = "", /) -> None:
        self._done += amount
        if note and self._is_time():
            self._said = (self._done, self._clock())
            say(f"{self._label}: {self._done}/{self._total}  {note}")

    def _is_time(self) -> bool:
        if self._said is None or self._done == self._total:
            return True
        done, when = self._said
        passed = self._clock() - when
        return passed >= LATEST or (passed >= SOONEST and (self._done - done) * LINES >= self._total)


def _ignore(amount: int, note: str = "", /) -> None:
    """Nobody is watching."""
