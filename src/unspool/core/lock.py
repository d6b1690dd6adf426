"""One writer per folder, enforced by a lock that the kernel releases whenever the process ends.

The lock file names the process that holds it. On a file system without locks, a lease replaces the lock: a file that
its holder renews every few seconds. Another process takes the lease over if it has not been renewed for a while.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unspool.core.errors import BusyError, naming
from unspool.core.formatting import excerpt, one_line

logger = logging.getLogger(__name__)

LOCK = ".unspool.lock"
LEASE = ".lease"  # suffix of the lock file's name
# What `flock` returns where the file system has no locks, such as some NFS and Lustre mounts.
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 30.0
POLL_SECONDS = 0.2
_held: set[int] = set()  # descriptors of this process


@contextmanager
def lock_run(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock a run's folder for writing; BusyError names the process that holds the lock. Creates the folder.

    Several processes can hold a `shared` lock at the same time; an exclusive lock excludes all others.
    """
    with _lock(folder / LOCK, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
        yield


@contextmanager
def lock_output(path: Path) -> Iterator[None]:
    """Lock a file or folder for writing: the run that contains it, or else the path itself by a file next to it."""
    path = path.resolve()
    run = next((one for one in (path, *path.parents) if (one / LOCK).is_file() or (one / "run.json").is_file()), None)
    if run is not None:
        with lock_run(run):
            yield
        return
    with _lock(path.with_name(path.name + ".lock"), path, fcntl.LOCK_EX):
        yield


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Lock a file; wait while another process holds it."""
    with ExitStack() as stack:
        waited = False
        while True:
            try:
                stack.enter_context(_lock(path, path.parent, fcntl.LOCK_EX))
                break
            except BusyError as error:
                if not waited:
                    logger.info(f"waiting, because {str(error).split('. Wait')[0]}")
                waited = True
                time.sleep(POLL_SECONDS)
        yield


def _make_folder(folder: Path) -> list[Path]:
    """Create a folder; return the folders that were missing, the deepest first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


@contextmanager
def _lock(path: Path, what: Path, mode: int) -> Iterator[None]:
    made = _make_folder(path.parent)
    try:
        with _lock_file(path, what, mode):
            yield
    finally:
        for folder in made:  # empty if the command was refused before it wrote anything
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _lock_file(path: Path, what: Path, mode: int) -> Iterator[None]:
    try:
        with naming(path.parent):
            descriptor, problem = _take_lock(path, what, mode)
    except OSError as error:
        if error.filename == str(path):
            error.filename = str(what)  # what the user named
        raise
    if descriptor is None:
        logger.warning(
            f"{path.parent}: this file system has no locks ({problem}); using a lease instead, renewed every "
            f"{RENEW_SECONDS:g} s"
        )
        with _lease(path.with_name(path.name + LEASE), what):
            yield
        return
    owner = os.getpid()
    _held.add(descriptor)
    try:
        _write_holder(descriptor)
        yield
    finally:
        if os.getpid() == owner:  # not in a forked process
            # Only the last holder of a shared lock may remove the file. A process that opened it meanwhile notices.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            _held.discard(descriptor)
            os.close(descriptor)


def _take_lock(path: Path, what: Path, mode: int) -> tuple[int | None, str]:
    """Return the descriptor of the locked file; None and the reason if there are no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor, ""
            os.close(descriptor)  # its last holder has just removed it
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise BusyError(_describe(what, holder)) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_LOCKS:
                raise
            path.unlink(missing_ok=True)
            return None, error.strerror or str(error)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    """Close the lock in a forked process, which would otherwise keep it after its parent has died."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


# The holder


def _write_holder(descriptor: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "command": " ".join(["unspool", *sys.argv[1:]]),
    }
    with suppress(OSError):  # the disk is full; the next write fails with its own message
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _read_holder(descriptor: int, *, seconds: float = 1.0) -> dict[str, Any]:
    """Read what the holder has written; wait up to `seconds`, since it may still be writing."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(ValueError):
            found = json.loads(os.pread(descriptor, 1 << 16, 0))
            if isinstance(found, dict):
                return found
        if time.monotonic() > deadline:
            return {}
        time.sleep(0.02)


def _describe(what: Path, holder: dict[str, Any]) -> str:
    who = "another process is writing to it"
    if holder:
        pid, host, started, command = (
            excerpt(one_line(str(holder.get(key, "?")))) for key in ("pid", "host", "started", "command")
        )
        who = f"process {pid} on {host} has been writing to it since {started} ({command})"
    return f"{what} is in use: {who}. Wait for it to end, stop it, or use another folder."


# Leases


@contextmanager
def _lease(path: Path, what: Path) -> Iterator[None]:
    descriptor = _take_lease(path, what)
    ended, owner = threading.Event(), os.getpid()

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            if not _is_at(descriptor, path):
                # This process was suspended for so long that another one took the lease over.
                print(f"error: {what}: another process took over this process's lease; stopping", file=sys.stderr)
                os._exit(2)
            os.utime(descriptor)

    threading.Thread(target=renew, name="unspool-lease", daemon=True).start()
    try:
        yield
    finally:
        if os.getpid() == owner:
            ended.set()
            if _is_at(descriptor, path):
                path.unlink()
            os.close(descriptor)


def _take_lease(path: Path, what: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            with suppress(FileNotFoundError):
                _remove_expired(path, what)
            continue
        _write_holder(descriptor)
        return descriptor


def _remove_expired(path: Path, what: Path) -> None:
    """Remove a lease that is not renewed; BusyError if it is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        holder = _read_holder(descriptor)
    finally:
        os.close(descriptor)
    seen = path.stat()
    if not _has_died(holder):
        logger.info(f"{what}: waiting up to {EXPIRE_SECONDS:g} s for another process to renew its lease")
        # Compare changes and not times, because the clocks of two hosts may differ.
        deadline = time.monotonic() + EXPIRE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(min(0.5, RENEW_SECONDS / 5))
            now = path.stat()
            if (now.st_ino, now.st_mtime_ns) != (seen.st_ino, seen.st_mtime_ns):
                raise BusyError(_describe(what, holder))
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    path.rename(aside)
    if aside.stat().st_ino != seen.st_ino:
        # A third process was faster; this is its new lease.
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


def _has_died(holder: dict[str, Any]) -> bool:
    """Return whether the holder is known to be dead, which only its own host can tell."""
    if holder.get("host") != socket.gethostname() or not isinstance(holder.get("pid"), int):
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
