"""Ask a generator: what was asked before comes from the file of replies, the rest in turns and with patience.

In: requests. Out: replies, in order; Failed where a server gave none in all attempts.
Promise: no request is under way twice at a time; not more at a time than allowed; every attempt that went wrong is
counted by its kind; if many requests in a row fail, the run ends and says why, since the server is down.
Elsewhere: who answers (generators.py), limits per minute (pace.py), what is kept (replies.py).
"""

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Protocol, Self

from unspool.core.artifacts import digest
from unspool.core.errors import ConfigError, UnspoolError
from unspool.evals.backends.openai import Passing, Patience, pause_after, plain

# Not more requests and tokens a minute than a server allows, over all threads.


BURST = 2.0


class Pace:
    def __init__(
        self,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep, self._lock = clock, sleep, Lock()
        now = clock()
        self._limits = [[now, 60 / limit] for limit in (requests_per_minute,) if limit]
        self._token_limits = [[now, 60 / limit] for limit in (tokens_per_minute,) if limit]
        self._held = now

    def wait(self, tokens: int) -> None:
        """Return when a request of so many tokens may begin."""
        with self._lock:
            now = self._clock()
            due = max([now, self._held])
            uses = [(limit, 1) for limit in self._limits] + [(limit, tokens) for limit in self._token_limits]
            for limit, _ in uses:
                limit[0] = max(limit[0], now - BURST)
                due = max(due, limit[0])
            for limit, amount in uses:
                limit[0] += amount * limit[1]
        if due > now:
            self._sleep(due - now)

    def hold(self, seconds: float) -> None:
        """Begin nothing for so long: the server asked for it."""
        with self._lock:
            self._held = max(self._held, self._clock() + seconds)


# Replies of generators, kept by content: nothing is asked or paid for twice.


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


# Requests in a row that a server may leave without an answer before the run gives up.
MOST_FAILURES = 20
CHARS_PER_TOKEN = 4  # of English, where nobody has counted yet


class Failed(Exception):  # noqa: N818
    """A request that got no answer; the kind of the last trouble."""


class Answering(Protocol):
    """What answers one request, or raises Passing."""

    @property
    def identity(self) -> str:
        """Everything besides the request that a reply depends on."""
        ...

    def reply(self, request: Request) -> Reply: ...


@dataclass
class Traffic:
    """What this process asked."""

    asked: int = 0  # new to the file of replies
    known: int = 0  # answered from it
    failed: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    troubles: Counter[str] = field(default_factory=Counter)


class Asking:
    """Requests to one generator, `width` at a time."""

    def __init__(
        self,
        answering: Answering,
        replies: Replies,
        *,
        width: int,
        pace: Pace | None = None,
        patience: Patience | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._answering, self._replies = answering, replies
        self._pace, self._patience, self._sleep = pace or Pace(), patience or Patience(), sleep
        self._pool = ThreadPoolExecutor(width, thread_name_prefix="ask")
        self._lock = Lock()
        self._under_way: dict[str, Future[Reply]] = {}
        self._failures_in_a_row = 0
        self._stopped = False
        self.traffic = Traffic()

    @property
    def identity(self) -> str:
        return self._answering.identity

    def ask(self, *requests: Request) -> list[Reply]:
        futures = [self._future(request) for request in requests]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _future(self, request: Request) -> Future[Reply]:
        key = request.key(self.identity)
        with self._lock:
            if key in self._under_way:
                return self._under_way[key]
            if (known := self._replies.get(key)) is not None:
                self.traffic.known += 1
                done: Future[Reply] = Future()
                done.set_result(known)
                return done
            future = self._pool.submit(self._one, key, request)
            self._under_way[key] = future
        future.add_done_callback(lambda _: self._forget(key))
        return future

    def _forget(self, key: str) -> None:
        with self._lock:
            self._under_way.pop(key, None)

    def _one(self, key: str, request: Request) -> Reply:
        tokens = len(request.prompt) // CHARS_PER_TOKEN + request.max_tokens
        last = Passing("stopped", "the run is ending")
        for number in range(self._patience.attempts):
            if self._stopped:
                raise Failed(last.kind)
            self._pace.wait(tokens)
            try:
                reply = self._answering.reply(request)
            except Passing as passing:
                last = passing
                self._note(passing)
                if passing.retry_after:
                    self._pace.hold(passing.retry_after)
                if number + 1 < self._patience.attempts:
                    self._sleep(pause_after(number, passing, self._patience))
                continue
            self._replies.add(key, reply)
            self._count(reply)
            return reply
        self._give_up(last)
        raise Failed(last.kind)

    def _note(self, passing: Passing) -> None:
        self._replies.note(passing.kind)
        with self._lock:
            self.traffic.troubles[passing.kind] += 1

    def _count(self, reply: Reply) -> None:
        with self._lock:
            self._failures_in_a_row = 0
            self.traffic.asked += 1
            self.traffic.prompt_tokens += reply.prompt_tokens
            self.traffic.reply_tokens += reply.reply_tokens

    def _give_up(self, last: Passing) -> None:
        with self._lock:
            self.traffic.asked += 1
            self.traffic.failed += 1
            self._failures_in_a_row += 1
            too_many = self._failures_in_a_row >= MOST_FAILURES
        if too_many:
            raise UnspoolError(
                f"the generator left {MOST_FAILURES} requests in a row without an answer, in "
                f"{self._patience.attempts} attempts each ({plain(last.problem)}). Start or mend it and run this "
                "again: every reply so far is kept."
            )
