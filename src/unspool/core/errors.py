"""Errors that a user can cause. Any other exception that escapes is a bug in Unspool.

Operating system errors stay `OSError`s until they end the command line, a worker process or a rank. Then `explain`
turns them into a sentence. `naming` adds the path to a failed write, which does not know it.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unspool.core.formatting import one_line


class UnspoolError(Exception):
    """An error that the user can fix, in one sentence; the command line prints it and exits with code 2.

    Example:
        >>> import unspool
        >>> try:
        ...     unspool.load("no/such/folder/model.gguf")
        ... except unspool.UnspoolError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


class ConfigError(UnspoolError):
    """A mistake in the recipe, on the command line or in an argument.

    Example:
        >>> import unspool
        >>> issubclass(unspool.ConfigError, unspool.UnspoolError)
        True
    """


class DataError(UnspoolError):
    """Unusable input data; the message names file and record.

    Example:
        >>> import unspool
        >>> model, tokenizer = unspool.load("asset:tiny-base")
        >>> try:
        ...     unspool.pack(["a text", 3], tokenizer, seq_len=16)
        ... except unspool.DataError as error:
        ...     print(str(error).split(":")[0])
        data, record 1
    """


class BusyError(UnspoolError):
    """Another process is writing to the same folder."""


_FREE_SPACE = "free some space and run the same command again, which continues where it stopped"
_CHECK_DISK = "check the disk or the network file system, then run the same command again"
_PERMISSIONS = "change the permissions, or use another path"
_WRONG_KIND = "move it away, or use another path"
_TOO_MANY_FILES = "raise the limit of open files (ulimit -n)"
_REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f), or use another file system",
    errno.EROFS: "write to another folder, or make the file system writable",
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.ENOENT: "it was moved, deleted or never existed; restore it and run the same command again",
    errno.ENOTDIR: "part of the path is a file, not a folder; use another path",
    errno.EISDIR: "it is a folder, not a file; " + _WRONG_KIND,
    errno.EEXIST: "it already exists; " + _WRONG_KIND,
    errno.ENOTEMPTY: "another program writes into it; stop that program and run the same command again",
    errno.EBUSY: "another program uses it; stop that program and run the same command again",
    errno.ETXTBSY: "another program uses it; stop that program and run the same command again",
    errno.ENAMETOOLONG: "use a shorter path or name",
    errno.ELOOP: "its symbolic links form a loop; correct them",
    errno.EMFILE: _TOO_MANY_FILES,
    errno.ENFILE: _TOO_MANY_FILES,
    errno.ENOMEM: "free some memory and run the same command again",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ENOTCONN, errno.EHOSTDOWN), _CHECK_DISK),
}
# How Rust libraries (safetensors, tokenizers) and `shutil.copytree` print the number of an error.
_NUMBER = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")


def system_error(error: BaseException | None) -> OSError | None:
    """Return the operating system error behind `error`; None if it is not one that a user can fix."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error if error.errno in _REMEDIES else None
        found = _NUMBER.search(str(error))
        number = int(found[1] or found[2]) if found else None
        if number in _REMEDIES:
            return OSError(number, os.strerror(number))
        error = error.__cause__
    return None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add a file name to operating system errors in this block: their own, or `path`."""
    try:
        yield
    except Exception as error:
        found = None if isinstance(error, UnspoolError) else system_error(error)
        if found is None:
            raise
        found.filename = str(path) if found.filename is None else found.filename
        if found is error:
            raise
        raise found from error


def explain(error: BaseException) -> str | None:
    """Return a sentence about an error that a user can fix: what is wrong, where, what to do; None for a bug."""
    if isinstance(error, UnspoolError):
        return str(error)
    found = system_error(error)
    if found is None or found.errno is None:
        return None
    # A failed rename has two files: the old name may have vanished, or the new one may already exist.
    files = (found.filename, found.filename2)
    where = " → ".join(one_line(os.fsdecode(file)) for file in files if isinstance(file, str | bytes | os.PathLike))
    what = os.strerror(found.errno)
    return f"{where}{': ' * bool(where)}{what[0].lower()}{what[1:]}; {_REMEDIES[found.errno]}."
