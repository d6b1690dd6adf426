"""Ask a generator: what was asked before comes from the file of replies, the rest in turns and with patience.

In: requests. Out: replies, in order; Failed where a server gave none in all attempts.
Promise: no request is under way twice at a time; not more at a time than allowed; every attempt that went wrong is
counted by its kind; if many requests in a row fail, the run ends and says why, since the server is down.
Elsewhere: who answers (generators.py), limits per minute (pace.py), what is kept (replies.py).
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

from unspool.base.errors import UnspoolError
from unspool.eval.backends.http import Passing, Patience, pause_after, plain
from unspool.synth.pace import Pace
from unspool.synth.replies import Replies, Reply, Request

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
