"""The errors a user can meet. Anything else that escapes is a bug of ours."""


class UnspoolError(Exception):
    """Printed by the CLI as one sentence, without a traceback, with exit code 2."""


class ConfigError(UnspoolError):
    """The user can fix it in the recipe or on the command line."""


class DataError(UnspoolError):
    """An input file is not what it should be; the message names file and record."""
