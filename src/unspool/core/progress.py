"""Progress of long work: a bar with ETA on a terminal, log lines elsewhere.

Both are shown at log level INFO and below.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

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

from unspool.core.console import PlainConsole
from unspool.core.formatting import format_duration

logger = logging.getLogger(__name__)
# Progress goes to stderr, so that `--json` on stdout stays clean.
console = PlainConsole(stderr=True)
# Without a terminal, a long job logs a line after every tenth of its work. Lines are at least MIN_SECONDS and at most
# MAX_SECONDS apart, so that a log shows whether the job is alive, or when it stopped. Work that ends within MIN_SECONDS
# logs no line, unless it has a `long_bar`.
LINES = 10
MIN_SECONDS, MAX_SECONDS = 30.0, 300.0
# Below this many columns only the text is shown, without the bar.
NARROW = 110


class Advance(Protocol):
    """Called with the number of newly finished items, and a short note such as the current loss."""

    def __call__(self, amount: int, note: str = "", /) -> None: ...


@contextmanager
def progress_bar(label: str, total: int | None, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Show a bar that disappears when done; without a terminal, log lines with the remaining time."""
    if not console.is_terminal or not logger.isEnabledFor(logging.INFO):
        yield _LinesWithEta(label, total, clock)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with _live_bar(columns, label, total) as advance:
        yield advance


@contextmanager
def long_bar(label: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """Show a bar for work that takes hours; without a terminal, log lines at intervals."""
    if not console.is_terminal or not logger.isEnabledFor(logging.INFO):
        yield _LogLines(label, total, clock)
        return
    bar = (BarColumn(bar_width=None),) if console.width >= NARROW else ()
    # A note that is too long is cut at its end; the count is never cut.
    count = MofNCompleteColumn(table_column=Column(min_width=2 * len(str(total)) + 1, no_wrap=True))
    columns = (
        TextColumn("{task.description}", markup=False),
        *bar,
        count,
        TextColumn("{task.fields[note]}", markup=False),
    )
    with _live_bar(columns, label, total, expand=True) as advance:
        yield advance


@contextmanager
def _live_bar(
    columns: tuple[ProgressColumn, ...], label: str, total: int | None, *, expand: bool = False
) -> Iterator[Advance]:
    # Log lines appear above the bar without redirection. Redirected streams would act on control sequences.
    shown = Progress(
        *columns, console=console, transient=True, expand=expand, redirect_stdout=False, redirect_stderr=False
    )
    with shown as progress:
        task = progress.add_task(label, total=total, note="")

        def advance(amount: int, note: str = "", /) -> None:
            progress.update(task, advance=amount, note=note)

        yield advance


class _LogLines:
    """Log the first note, the last one, and some between them."""

    def __init__(self, label: str, total: int | None, clock: Callable[[], float]) -> None:
        self._label, self._total, self._clock = label, total, clock
        self._done = 0
        self._last_line: tuple[int, float] | None = None  # items done, time

    def __call__(self, amount: int, note: str = "", /) -> None:
        self._done += amount
        if note and self._is_time():
            self._log(note)

    def _log(self, note: str) -> None:
        self._last_line = (self._done, self._clock())
        of = "" if self._total is None else f"/{self._total}"
        logger.info(f"{self._label}: {self._done}{of}  {note}".rstrip())

    def _is_time(self) -> bool:
        if self._last_line is None or self._done == self._total:
            return True
        done, when = self._last_line
        passed = self._clock() - when
        tenth = self._total is not None and (self._done - done) * LINES >= self._total
        return passed >= MAX_SECONDS or (passed >= MIN_SECONDS and tenth)


class _LinesWithEta(_LogLines):
    """Log nothing for MIN_SECONDS, then as above, with the remaining time."""

    def __init__(self, label: str, total: int | None, clock: Callable[[], float]) -> None:
        super().__init__(label, total, clock)
        self._began = clock()
        # The first report may count what an earlier run finished, or take long to start, so speed is measured after it.
        self._first: tuple[int, float] | None = None

    def __call__(self, amount: int, note: str = "", /) -> None:
        self._done += amount
        now = self._clock()
        if self._first is None:
            self._first = (self._done, now)
        elif now - self._began >= MIN_SECONDS and self._is_time():
            self._log(f"{note}  {self._eta(now)}".strip())

    def _eta(self, now: float) -> str:
        assert self._first is not None
        done, since = self._done - self._first[0], now - self._first[1]
        if self._total is None or not done:
            return ""
        return f"eta {format_duration((self._total - self._done) * since / done)}"
