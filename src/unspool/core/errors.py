"""Errors that a user can cause. Any other exception that escapes is a bug in Unspool."""


class UnspoolError(Exception):
    """The CLI prints the message without a traceback and exits with code 2."""


class ConfigError(UnspoolError):
    """A mistake in the recipe or on the command line."""


class DataError(UnspoolError):
    """An input file that cannot be used; the message names file and record."""


class BusyError(UnspoolError):
    """Another process is writing to the same folder."""
