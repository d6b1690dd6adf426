"""Not more requests and tokens a minute than a server allows, over all threads.

Promise: in any minute at most the allowed requests and tokens are begun, apart from one request that alone exceeds
the tokens of a minute; nobody is passed over, since turns are given out in the order of asking.
How: each limit has a time at which its next request may begin; a request moves it on by what it uses. After a pause
at most `BURST` seconds' worth may begin at once.
"""

import time
from collections.abc import Callable
from threading import Lock

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
