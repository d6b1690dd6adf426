"""Replies of generators, kept by content: nothing is asked or paid for twice.

In: the hash of model, request and sampling. Out: the reply, if it was given before.
Promise: a reply is on disk, in one line, before it is used; a line during which the process was killed is passed over
and its request asked again. Two processes never write to one file. Memory holds hashes and places, not texts.
"""

import fcntl
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from unspool.base.artefact import digest
from unspool.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to a generator; who is asked, and how, is part of its hash."""

    prompt: str
    max_tokens: int
    begin: str = ""  # the reply's first words; they are part of it

    def key(self, identity: str) -> str:
        # Without first words as it was before there were any, so that replies of earlier runs are found.
        return digest([identity, self.prompt, self.max_tokens, *([self.begin] if self.begin else [])])


@dataclass(frozen=True, kw_only=True)
class Reply:
    text: str
    prompt_tokens: int
    reply_tokens: int
    seconds: float
    is_cut: bool = False  # it reached the longest length allowed


class Replies:
    """The file, opened for one process: `with Replies(path) as replies`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._places: dict[str, tuple[int, int]] = {}
        self.troubles: Counter[str] = Counter()  # attempts that went wrong, by kind, of all runs
        self.seconds = 0.0
        self.reply_tokens = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"{path} is in use by another `unspool synth`; wait for it, or give this run another `out`."
            ) from None
        except OSError:
            pass  # some network file systems know no locks
        self._end = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def get(self, key: str) -> Reply | None:
        place = self._places.get(key)
        if place is None:
            return None
        return Reply(**json.loads(os.pread(self._file.fileno(), place[1], place[0]))["reply"])

    def add(self, key: str, reply: Reply) -> None:
        with self._lock:
            if key in self._places:
                return
            start, length = self._append({"key": key, "reply": asdict(reply)})
            self._places[key] = (start, length)
            self._count(reply)

    def note(self, trouble: str) -> None:
        """An attempt went wrong; counted over all runs."""
        with self._lock:
            self._append({"trouble": trouble})
            self.troubles[trouble] += 1

    def _append(self, record: dict[str, Any]) -> tuple[int, int]:
        data = (json.dumps(record, ensure_ascii=True) + "\n").encode()
        start = self._end
        while data:
            written = self._file.write(data) or 0
            data = data[written:]
            self._end += written
        return start, self._end - start

    def _count(self, reply: Reply) -> None:
        self.seconds += reply.seconds
        self.reply_tokens += reply.reply_tokens

    def _read(self) -> int:
        """Take in what is there; returns where to go on writing, on a line of its own."""
        at = 0
        line = b"\n"
        with self._path.open("rb") as file:
            for line in file:
                self._take(line, at)
                at += len(line)
        if not line.endswith(b"\n"):
            self._file.write(b"\n")
            at += 1
        return at

    def _take(self, line: bytes, at: int) -> None:
        try:
            record = json.loads(line)
            if "trouble" in record:
                self.troubles[record["trouble"]] += 1
                return
            reply = Reply(**record["reply"])
            self._places[str(record["key"])] = (at, len(line))
            self._count(reply)
        except (ValueError, KeyError, TypeError):
            return  # the line during which a run was killed
