"""Send the log lines of Unspool to the terminal.

Every module logs to `logging.getLogger(__name__)`. A program that imports Unspool decides what to print. The command
line calls `set_up_logging`, which writes plain lines to stderr, above the progress bars.
"""

import logging
from collections.abc import Callable

from unspool.core import progress

LOGGER = logging.getLogger("unspool")


class ConsoleHandler(logging.Handler):
    """Write each record as one plain line, through the console that also draws the progress bars."""

    translate: Callable[[str], str] = staticmethod(lambda text: text)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            progress.console.print(self.translate(self.format(record)), markup=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def set_up_logging(level: int = logging.INFO, translate: Callable[[str], str] = lambda text: text) -> None:
    """Print log lines of at least this level on stderr; below INFO each line names its module.

    `translate` gives the text to print for a line.
    """
    LOGGER.setLevel(level)
    LOGGER.propagate = False  # a library's handler on the root logger would print every line twice
    handlers = [handler for handler in LOGGER.handlers if isinstance(handler, ConsoleHandler)]
    if not handlers:
        handlers = [ConsoleHandler()]
        LOGGER.addHandler(handlers[0])
    handlers[0].translate = translate
    handlers[0].setFormatter(logging.Formatter("%(name)s: %(message)s" if level < logging.INFO else "%(message)s"))


def silence() -> None:
    """Print no log lines in this process: ranks other than 0 would repeat every line."""
    LOGGER.setLevel(logging.CRITICAL + 1)
    progress.console.quiet = True
