"""Send concurrent requests to a generator, with cache, rate limits and retries."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from unspool.core.artifacts import digest
from unspool.core.errors import UnspoolError
from unspool.core.http_client import RetryPolicy, TransientError, printable_line, with_retries
from unspool.evals.reply_cache import ReplyCache

MAX_FAILURES_IN_A_ROW = 20  # then the server counts as down and the run ends
BURST_SECONDS = 2.0  # seconds of unused rate that a limit carries over
CHARS_PER_TOKEN = 4  # estimate for English text, without a tokenizer


class RequestFailedError(Exception):
    """A request got no reply after all attempts. The message is the kind of the last error."""


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: str
    max_tokens: int
    begin: str = ""  # first words of the reply, which the model continues

    def key(self, identity: str) -> str:
        """Cache key for a generator with this identity. Without `begin`, equal to keys of older versions."""
        return digest([identity, self.prompt, self.max_tokens, *([self.begin] if self.begin else [])])


@dataclass(frozen=True, kw_only=True)
class Reply:
    text: str
    prompt_tokens: int
    reply_tokens: int
    seconds: float
    is_cut: bool = False  # True if it reached max_tokens


class GeneratorReplies(ReplyCache):
    """The reply cache of a run, with errors and speed of all processes that wrote to it."""

    def __init__(self, path: Path) -> None:
        self.errors: Counter[str] = Counter()  # failed attempts by kind
        self.seconds = 0.0
        self.reply_tokens = 0
        super().__init__(path, exclusive=True)

    def get(self, key: str) -> Reply | None:
        found = self.read_reply(key)
        return None if found is None else Reply(**found)

    def add(self, key: str, reply: Reply) -> None:
        self.write_reply(key, asdict(reply))

    def add_error(self, kind: str) -> None:
        """Count a failed attempt."""
        with self._write_lock:
            self._append({"trouble": kind})

    def _index(self, record: dict[str, Any], offset: int, length: int) -> None:
        if "trouble" in record:
            self.errors[record["trouble"]] += 1
            return
        reply = Reply(**record["reply"])
        super()._index(record, offset, length)
        self.seconds += reply.seconds
        self.reply_tokens += reply.reply_tokens


class RateLimiter:
    """Delays requests of all threads to stay within per-minute limits."""

    def __init__(
        self,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep, self._lock = clock, sleep, Lock()
        limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._seconds_per = {unit: 60 / limit for unit, limit in limits.items() if limit}
        now = clock()
        self._free_at = dict.fromkeys(self._seconds_per, now)
        self._paused_until = now

    def wait(self, tokens: int) -> None:
        """Wait until a request of this many tokens may start."""
        with self._lock:
            now = self._clock()
            start = max(now, self._paused_until)
            for unit, seconds in self._seconds_per.items():
                free_at = max(self._free_at[unit], now - BURST_SECONDS)
                start = max(start, free_at)
                self._free_at[unit] = free_at + seconds * (tokens if unit == "tokens" else 1)
        if start > now:
            self._sleep(start - now)

    def pause(self, seconds: float) -> None:
        """Start no request for this long. Servers request this with Retry-After."""
        with self._lock:
            self._paused_until = max(self._paused_until, self._clock() + seconds)


class GeneratorBackend(Protocol):
    """Answers one request. Raises TransientError if a retry may help."""

    @property
    def identity(self) -> str:
        """Hash of everything that a reply depends on, except the request."""
        ...

    def reply(self, request: Request) -> Reply: ...


@dataclass
class RequestStats:
    """Request counts of this process."""

    sent: int = 0  # requests without a cached reply
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class GeneratorClient:
    """Sends requests to one generator: at most `width` concurrently, and equal requests only once."""

    def __init__(
        self,
        backend: GeneratorBackend,
        replies: GeneratorReplies,
        *,
        width: int,
        limiter: RateLimiter | None = None,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._backend, self._replies = backend, replies
        self._limiter, self._retry, self._sleep = limiter or RateLimiter(), retry or RetryPolicy(), sleep
        self._pool = ThreadPoolExecutor(width, thread_name_prefix="request")
        self._lock = Lock()
        self._in_flight: dict[str, Future[Reply]] = {}
        self._failures_in_a_row = 0
        self._stopped = False
        self.stats = RequestStats()

    @property
    def identity(self) -> str:
        return self._backend.identity

    def send(self, *requests: Request) -> list[Reply]:
        """Return the replies in order. Raises RequestFailedError, or UnspoolError if the server seems to be down."""
        futures = [self._submit(request) for request in requests]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Start no more requests and wait for requests in flight."""
        self._stopped = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, request: Request) -> Future[Reply]:
        key = request.key(self.identity)
        with self._lock:
            if (begun := self._in_flight.get(key)) is not None:
                return begun
            if (cached := self._replies.get(key)) is not None:
                self.stats.cached += 1
                done: Future[Reply] = Future()
                done.set_result(cached)
                return done
            future = self._pool.submit(self._run, key, request)
            self._in_flight[key] = future
        # Do not take the lock: `close` calls this while it holds the pool's lock, which `submit` needs above.
        future.add_done_callback(lambda _: self._in_flight.pop(key, None))
        return future

    def _run(self, key: str, request: Request) -> Reply:
        tokens = len(request.prompt) // CHARS_PER_TOKEN + request.max_tokens

        def attempt() -> Reply:
            if self._stopped:
                raise RequestFailedError("stopped")
            self._limiter.wait(tokens)
            return self._backend.reply(request)

        try:
            reply = with_retries(attempt, self._retry, sleep=self._sleep, on_error=self._count_error)
        except TransientError as error:
            self._count(None)
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise UnspoolError(
                    f"the generator did not answer {MAX_FAILURES_IN_A_ROW} requests in a row, with "
                    f"{self._retry.attempts} attempts each ({printable_line(error.problem)}). Restart or repair the "
                    "server, then run the same command again; all replies so far are cached."
                ) from None
            raise RequestFailedError(error.kind) from None
        self._replies.add(key, reply)
        self._count(reply)
        return reply

    def _count_error(self, error: TransientError) -> None:
        self._replies.add_error(error.kind)
        if error.retry_after:
            self._limiter.pause(error.retry_after)
        with self._lock:
            self.stats.errors[error.kind] += 1

    def _count(self, reply: Reply | None) -> None:
        """Count a finished request. A failed request has no reply."""
        with self._lock:
            self.stats.sent += 1
            if reply is None:
                self.stats.failed += 1
                self._failures_in_a_row += 1
            else:
                self._failures_in_a_row = 0
                self.stats.prompt_tokens += reply.prompt_tokens
                self.stats.reply_tokens += reply.reply_tokens
