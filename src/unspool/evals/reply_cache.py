"""Store replies of language models in an append-only JSONL file, so that no request is sent twice."""

import fcntl
import json
import logging
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError, naming

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"  # suffix of the file to which damaged lines are moved


class ReplyCache:
    """Replies by key: `with ReplyCache(path) as cache`.

    When `write_reply` returns, the reply is in the file, with a checksum. Memory holds only offsets. The last line of a
    killed run may be incomplete and is cut off. Damaged lines move to another file, and their requests are sent again.
    With `exclusive`, a second process that opens the file gets a ConfigError.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        self._path, self._write_lock = path, Lock()
        self._spans: dict[str, tuple[int, int]] = {}  # key: offset and length of its line
        self._file: FileIO | None = None
        if exclusive or path.exists():
            self._file = self._open(exclusive)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, key: str) -> bool:
        return key in self._spans

    def read_reply(self, key: str) -> Any:
        """The reply as decoded JSON; None if there is none."""
        if key not in self._spans:
            return None
        assert self._file is not None
        offset, length = self._spans[key]
        return json.loads(os.pread(self._file.fileno(), length, offset))["reply"]

    def write_reply(self, key: str, reply: Any, *, replace: bool = False, **fields: Any) -> None:
        """Append a reply, with extra fields for people who read the file.

        Does nothing if the key already has a reply, unless `replace` is set. The last reply of a key counts.
        """
        with self._write_lock:
            if replace or key not in self._spans:
                self._append({"key": key, **fields, "reply": reply})

    def _append(self, record: dict[str, Any]) -> None:
        data = (json.dumps({**record, "sha256": digest(record)}) + "\n").encode()
        self._file = self._file or self._open(exclusive=False)
        left = data
        with naming(self._path):
            while left:
                left = left[self._file.write(left) or 0 :]
        # In append mode, the position is the end of this record, even if other processes also append.
        self._index(record, self._file.tell() - len(data), len(data))

    def _index(self, record: dict[str, Any], offset: int, length: int) -> None:
        """Register a record that was read or written. Subclasses may add counters."""
        self._spans[str(record["key"])] = (offset, length)

    def _open(self, exclusive: bool) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(self._path, "a+")
        if exclusive:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise ConfigError(
                    f"{self._path} is in use by another process; wait until it ends, or set another `out` for this run."
                ) from None
            except OSError:
                pass  # some network file systems do not support locks
        if self._repair():
            file.close()
            return self._open(exclusive)  # the file was replaced
        offset = 0
        with self._path.open("rb") as lines:
            for line in lines:
                record = _checked(line)
                if record is not None:
                    with suppress(KeyError, TypeError):  # a record of an older version, without a checksum
                        self._index(record, offset, len(line))
                offset += len(line)
        return file

    def _repair(self) -> bool:
        """Cut off an incomplete last line and move damaged lines. Returns whether the file was replaced."""
        damaged, offset, end = [], 0, b"\n"
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip() and _checked(line) is None:
                    if not line.endswith(b"\n"):
                        os.truncate(self._path, offset)  # a run was killed
                        break
                    damaged.append(number)
                offset, end = offset + len(line), line[-1:]
        if end != b"\n":
            with self._path.open("ab") as file:
                file.write(b"\n")
        if not damaged:
            return False
        beside, aside = (self._path.with_name(self._path.name + ending) for ending in (DAMAGED, ".tmp"))
        with self._path.open("rb") as lines, beside.open("ab") as bad, aside.open("wb") as good:
            for number, line in enumerate(lines, 1):
                (bad if number in damaged else good).write(line)
        aside.replace(self._path)
        logger.warning(
            f"{self._path}: {len(damaged)} cached replies are damaged (first: line {damaged[0]}). They are moved to "
            f"{beside.name} and requested again; all other replies are kept"
        )
        return True


def _checked(line: bytes) -> dict[str, Any] | None:
    """The record on a line; None if it is damaged."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not record.keys() & {"key", "trouble"}:
        return None
    checksum = record.pop("sha256", None)
    return record if checksum is None or checksum == digest(record) else None
